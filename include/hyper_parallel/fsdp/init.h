#pragma once
// Values for parameters that began on the meta device, weights from outside, and conversions, without a front end. Modules have
// these as methods of HSDPModule, which look after buffers too.
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/fsdp/unit.h>

namespace at {
struct Generator;
}

namespace hyper_parallel::fsdp {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Fills one whole parameter.
/// \param name fully qualified below the outermost unit
/// \param whole shape and master dtype of the whole parameter, on the mesh's device; no values yet
/// \param generator seeded from the seed and the name alone
using InitParameter = std::function<void(const std::string& name, at::Tensor& whole, at::Generator& generator)>;

/// Of the unit's mesh: "cpu", "cuda".
[[nodiscard]] HP_API const std::string& device_type(const UnitHandle& root);

/// Gives memory to every parameter and buffer of the tree that is still on the meta device; the others keep their values. The
/// leaves stay the same tensors. What has no values by the first forward is named there. Local. ValueError in the middle of a
/// step.
HP_API void to_empty(const UnitHandle& root);

/// Calls `init` for each parameter of the tree with a whole tensor, and keeps this rank's part: the values depend on seed and
/// names, not on world, mesh, layout or units. Memory: one parameter besides the shards. Local; the ranks of a mesh must pass the
/// same seed. ValueError: in the middle of a step; a parameter that `init` leaves unwritten.
HP_API void reset_parameters(const UnitHandle& root, std::uint64_t seed, const InitParameter& init);

/// Generator of a parameter, or of anything else that has a name.
[[nodiscard]] HP_API at::Generator named_generator(std::uint64_t seed, const std::string& name);

/// Copies this rank's parts out of whole tensors that every rank has, and buffers in full, casting to the dtypes of the model;
/// what is on meta gets memory first. Local. \param strict values and model must have the same names; otherwise names that only
/// one side has are passed over ValueError, nothing is changed then: in the middle of a step, a name that is missing or unknown,
/// a wrong shape.
HP_API void load_full(const UnitHandle& root, const NamedTensors& values, bool strict = true);

/// Like load_full with values that only rank 0 of the data-parallel group has; the other ranks pass none. Each parameter is cut
/// and sent on its own: memory besides the shards is one parameter. Collective over the mesh. ValueError on all ranks alike, with
/// rank 0's text, before anything is changed; CommError.
HP_API void load_from_rank0(const UnitHandle& root, const NamedTensors& values, bool strict = true);

/// Casts the floating buffers of the tree. Local; all ranks must call it. ValueError: no floating type.
HP_API void cast_buffers(const UnitHandle& root, c10::ScalarType dtype);

/// Changes the master dtype of every floating parameter of the tree and of its .grad, and the dtype of floating buffers. The
/// leaves stay the same tensors; old memory is released. Without `param_dtype` or `reduce_dtype` in the policy, compute and
/// reduction follow. The next forward compares the ranks again. Local; all ranks must call it. ValueError: no floating type, in
/// the middle of a step.
HP_API void convert(const UnitHandle& root, c10::ScalarType dtype);

}  // namespace hyper_parallel::fsdp
