// Copying what nobody reads soon.
#pragma once

#include <cstddef>

namespace ftcomm {

// As memcpy, but the destination does not come into the caches: it costs no read of the old content there, and what is in use stays. Its
// end is ordered before later stores, as that of memcpy is.
void copy_past_cache(void* to, const void* from, std::size_t bytes);

}  // namespace ftcomm
