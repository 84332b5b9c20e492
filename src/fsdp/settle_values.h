#pragma once
#include <vector>

namespace hyper_parallel::fsdp {

class Unit;

/// The part of the first forward that looks at values: nothing may be without them, and replicas are compared or made equal where
/// the options ask for it. Collective over the meshes of `units`, whose plans are known to be equal. ValueError on all ranks,
/// naming every parameter and buffer without values, or the first parameter in which replicas differ.
void settle_values(const std::vector<Unit*>& units);

}  // namespace hyper_parallel::fsdp
