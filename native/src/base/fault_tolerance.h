// Whether this library can lose ranks. It can, but for a build that benchmarks/fault_tolerance_cost.py compares it with: there the fence
// of collectives that go by frames, the labels of segments and what is kept for others after an operation are compiled out. Results
// are right as long as nobody fails; when somebody does, nothing is promised.
#pragma once

namespace ftcomm {

#ifdef FTCOMM_WITHOUT_FAULT_TOLERANCE
inline constexpr bool kFaultTolerant = false;
#else
inline constexpr bool kFaultTolerant = true;
#endif

}  // namespace ftcomm
