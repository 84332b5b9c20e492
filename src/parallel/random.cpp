#include <hyper_parallel/parallel/random.h>

#include <algorithm>
#include <set>
#include <sstream>

#include <hyper_parallel/fsdp/init.h>

#include "nn/factory_mode.h"

namespace hyper_parallel::parallel {
namespace {

constexpr const char* kOp = "RandomStates";

/// In mesh order, so that a set of axes has one name.
std::vector<std::string> in_mesh_order(const DeviceMesh& mesh, const std::vector<std::string>& axes) {
  const std::set<std::string> wanted(axes.begin(), axes.end());
  check_value(wanted.size() == axes.size(), kOp, "an axis is named twice, want each once");
  for (const std::string& axis : axes) (void)mesh.axis(axis);
  std::vector<std::string> ordered;
  for (const std::string& axis : mesh.mesh_dim_names()) {
    if (wanted.contains(axis)) ordered.push_back(axis);
  }
  return ordered;
}

std::string joined(const std::vector<std::string>& axes) {
  std::string text;
  for (const std::string& axis : axes) text += concat(text.empty() ? "" : ",", axis);
  return text;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

}  // namespace

struct RandomStates::Fork::Scope {
  explicit Scope(const at::Generator& generator) : kept(generator), active(kept) {}
  at::Generator kept;
  nn::GeneratorScope active;
};

RandomStates::Fork::Fork(const at::Generator& generator) : scope_(std::make_unique<Scope>(generator)) {}
RandomStates::Fork::Fork(Fork&& other) noexcept = default;
RandomStates::Fork::~Fork() = default;

RandomStates::RandomStates(std::uint64_t seed, DeviceMesh mesh) : seed_(seed), mesh_(std::move(mesh)) {
  check_value(mesh_.defined(), kOp, "no mesh, want the one whose axes tell ranks apart");
}

at::Generator RandomStates::generator(const std::vector<std::string>& axes) {
  const std::vector<std::string> ordered = in_mesh_order(mesh_, axes);
  const std::string name = joined(ordered);
  const auto found = streams_.find(name);
  if (found != streams_.end()) return found->second;
  std::string place = "random";
  for (const std::string& axis : ordered) place += concat('|', axis, '=', mesh_.get_local_rank(axis));
  return streams_.emplace(name, fsdp::named_generator(seed_, place)).first->second;
}

RandomStates::Fork RandomStates::fork(const std::vector<std::string>& axes) { return Fork(generator(axes)); }

std::vector<at::Generator> RandomStates::generators() const {
  std::vector<at::Generator> all;
  for (const auto& [name, generator] : streams_) all.push_back(generator);
  return all;
}

std::map<std::string, at::Tensor> RandomStates::state() const {
  std::map<std::string, at::Tensor> states;
  for (const auto& [name, generator] : streams_) states[name] = generator.get_state();
  return states;
}

void RandomStates::set_state(const std::map<std::string, at::Tensor>& state) {
  for (const auto& [name, value] : state) (void)in_mesh_order(mesh_, split(name));
  for (const auto& [name, value] : state) {
    at::Generator stream = generator(split(name));
    stream.set_state(value);
  }
}

}  // namespace hyper_parallel::parallel
