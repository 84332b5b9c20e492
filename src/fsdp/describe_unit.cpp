// What the ranks compare of a unit, as text.
#include <string>
#include <variant>
#include <vector>

#include "fsdp/unit_impl.h"

namespace hyper_parallel::fsdp {

std::string Unit::after_forward_text() const {
  const auto after = after_forward();
  if (after == AfterForward::kCut) return concat(std::get<int>(*options_.reshard_after_forward));
  // Ranks whose blocks are smaller may decide otherwise; they gather among themselves.
  if (const MemoryBudget* limit = budget(); limit != nullptr && mesh_.has_source())
    return concat("within ", limit->bytes, " bytes");
  return after == AfterForward::kFree ? "true" : "false";
}

void Unit::describe(std::vector<std::string>& lines) const {
  const auto dtype = [](const std::optional<at::ScalarType>& type) { return type ? concat(*type) : std::string("default"); };
  const MixedPrecisionPolicy& policy = options_.mp_policy;
  lines.push_back(concat("unit ", name_, ": ", mesh_.whole.to_string(), ", layout ",
                         options_.shard_layout == ShardLayout::kRagged ? "ragged" : "per-parameter",
                         options_.comm_fusion ? "" : " unfused", ", param_dtype ", dtype(policy.param_dtype), ", reduce_dtype ",
                         dtype(policy.reduce_dtype), policy.apply_grad_on_fp32_main_grad ? ", fp32 main gradients" : "",
                         ", reshard_after_forward ", after_forward_text(),
                         options_.replica_init == ReplicaInit::kNone    ? ""
                         : options_.replica_init == ReplicaInit::kCheck ? ", replicas compared"
                                                                        : ", replicas broadcast"));
  for (const auto& group : groups_) {
    for (std::size_t i = 0; i < group->parameters().size(); ++i) {
      const ManagedParameter& parameter = group->parameters()[i];
      lines.push_back(concat("parameter ", qualified(parameter), " of unit ", name_, ": ", group->shard().scalar_type(), ' ',
                             at::IntArrayRef(parameter.whole_shape),
                             group->options().replicated ? std::string(", whole")
                                                         : concat(", sharded on dim ", group->layout().parameter(i).shard_dim),
                             group->options().source.empty()
                                 ? ""
                                 : concat(" of ", group->options().source[i].layout.to_string(mesh_.whole.mesh_dim_names())),
                             parameter.trainable ? "" : ", frozen", parameter.uninitialised ? ", began on the meta device" : ""));
    }
  }
  for (const auto& buffer : buffers_without_values()) lines.push_back(concat("buffer ", buffer.first, " has no values"));
}

}  // namespace hyper_parallel::fsdp
