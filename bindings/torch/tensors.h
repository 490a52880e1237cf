// What torch's tensors, reductions and timeouts are in the C interface's terms, and what is refused.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace ftcomm_torch {

// FT dtype codes are those of native/src/base/dtype.h.
// -1: none that the library knows.
std::int32_t known_type(at::ScalarType type);
struct Element {
    std::int32_t dtype = 0;
    std::uint64_t per_item = 1;  // elements per item of the tensor: more than 1 where a type is only moved, as bytes
};
// For operations that compute: refuses a type that the library cannot add.
Element reducible(const at::Tensor& tensor, std::int32_t op);
// For operations that only move data: types unknown to the library go as bytes.
Element movable(const at::Tensor& tensor);

struct Reduction {
    std::int32_t op = 0;
    double factor = 1.0;
};
Reduction reduction(const c10d::ReduceOp& op);

// Refuses what has no single dense block of memory, with what to do about it.
void check_tensor(const at::Tensor& tensor, const char* what);
void check_list(const std::vector<at::Tensor>& tensors, const char* what);
void check_same_kind(const at::Tensor& a, const at::Tensor& b, const char* what);
bool any_on_a_device(const std::vector<at::Tensor>& tensors);
const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* what);

// Seconds; 0 for "the group's" (c10d's unset is -1 ms).
double seconds(std::chrono::milliseconds timeout);

}  // namespace ftcomm_torch
