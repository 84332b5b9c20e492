#pragma once
// A small network with everything that sharding makes difficult, and helpers to compare a sharded run with a plain one.
#include <array>
#include <map>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

namespace hyper_parallel::testing {

inline constexpr std::array kLayouts = {ShardLayout::kPerParameter, ShardLayout::kRagged};

/// 1-D: shards; 2-D: replicates and shards.
inline FullyShardOptions on_mesh(const std::vector<int64_t>& shape, ShardLayout layout = ShardLayout::kPerParameter,
                                 std::optional<bool> reshard = {}) {
  FullyShardOptions options;
  options.mesh =
      shape.size() == 1 ? init_device_mesh("cpu", shape, {"dp"}) : init_device_mesh("cpu", shape, {"dp_replicate", "dp_shard"});
  options.shard_layout = layout;
  options.reshard_after_forward = reshard;
  return options;
}

inline FullyShardOptions on_all(ShardLayout layout = ShardLayout::kPerParameter, std::optional<bool> reshard = {}) {
  return on_mesh({get_world_size()}, layout, reshard);
}

/// Number of ranks of a mesh.
inline int ranks_of(const std::vector<int64_t>& shape) { return static_cast<int>(c10::multiply_integers(shape)); }

/// Values that differ from element to element and from step to step.
inline torch::Tensor wave(at::IntArrayRef shape, int step) {
  const int64_t numel = c10::multiply_integers(shape);
  return torch::sin(torch::arange(numel, torch::kFloat) * 0.7 + step).view(shape);
}

/// x + scale * b(silu(a(x))): odd widths, a bias, a scalar parameter.
struct MlpImpl : torch::nn::Module {
  MlpImpl(int64_t dim, int64_t hidden) {
    a = register_module("a", torch::nn::Linear(dim, hidden));
    b = register_module("b", torch::nn::Linear(hidden, dim));
    scale = register_parameter("scale", torch::tensor(0.7F));
  }
  torch::Tensor forward(torch::Tensor x) { return x + scale * b(torch::silu(a(x))); }
  torch::nn::Linear a = nullptr, b = nullptr;
  torch::Tensor scale;
};
HP_MODULE(Mlp);

/// A unit around a unit.
struct NestImpl : torch::nn::Module {
  explicit NestImpl(int64_t dim) {
    p = register_module("p", torch::nn::Linear(torch::nn::LinearOptions(dim, dim).bias(false)));
    inner = register_module("inner", Mlp(dim, 7));
    q = register_module("q", torch::nn::Linear(dim, dim));
  }
  torch::Tensor forward(const torch::Tensor& x) { return q(torch::tanh(inner(p(x)))); }
  torch::nn::Linear p = nullptr, q = nullptr;
  Mlp inner = nullptr;
};
HP_MODULE(Nest);

/// Output projection with the weight of the embedding table.
struct TiedHeadImpl : torch::nn::Module {
  TiedHeadImpl(const torch::Tensor& table, int64_t vocab) {
    weight = register_parameter("weight", table);
    bias = register_parameter("bias", torch::zeros({vocab}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::nn::functional::linear(x, weight, bias); }
  torch::Tensor weight, bias;
};
TORCH_MODULE(TiedHead);

struct NetOptions {
  bool first_twice = false;  ///< u1 runs twice in one forward
  bool skip_last = false;    ///< u4 does not run
  bool drop_last = false;    ///< u4 runs, its result is not used
  int64_t dim = 12;          ///< of the activations: NetImpl::kDim
};

/// Embedding table tied to the output head (both in the root), four blocks.
struct NetImpl : torch::nn::Module {
  static constexpr int64_t kDim = 12, kVocab = 11;
  explicit NetImpl(const NetOptions& net_options = {}) : options(net_options) {
    const int64_t dim = options.dim;
    table = register_module("table", torch::nn::Embedding(kVocab, dim));
    u1 = register_module("u1", Mlp(dim, 20));
    u2 = register_module("u2", Nest(dim));
    u3 = register_module("u3", Mlp(dim, 3));
    u4 = register_module("u4", Mlp(dim, 5));
    head = register_module("head", TiedHead(table->weight, kVocab));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto h = u2(u1(table(tokens)));
    if (options.first_twice) h = u1(torch::relu(h));
    h = u3(h);
    if (options.drop_last) {
      (void)u4(h);
    } else if (!options.skip_last) {
      h = u4(h);
    }
    return head(h);
  }
  NetOptions options;
  torch::nn::Embedding table = nullptr;
  Mlp u1 = nullptr, u3 = nullptr, u4 = nullptr;
  Nest u2 = nullptr;
  TiedHead head = nullptr;
};
HP_MODULE(Net);

/// Equal weights for equal seeds, on every rank. Takes the global generator's lock order out of the picture: own generator.
inline void seed_parameters(torch::nn::Module& module, uint64_t seed) {
  torch::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  for (auto& entry : module.named_parameters()) {
    if (entry.value().is_floating_point()) entry.value().normal_(0.0, 0.3, generator);
  }
}

inline Net make_net(const NetOptions& options = {}, uint64_t seed = 1) {
  Net net(options);
  seed_parameters(*net, seed);
  return net;
}

/// Shards every block and the root.
inline HSDPModule shard_net(const Net& net, const FullyShardOptions& options) {
  fully_shard(net->u1, options);
  fully_shard(net->u2->inner, options);
  fully_shard(net->u2, options);
  fully_shard(net->u3, options);
  fully_shard(net->u4, options);
  return fully_shard(net, options);
}

struct Batch {
  torch::Tensor tokens, targets;  ///< [rows, length]
  [[nodiscard]] Batch part(int64_t index, int64_t parts) const {
    const int64_t rows = tokens.size(0) / parts;
    return {tokens.narrow(0, index * rows, rows), targets.narrow(0, index * rows, rows)};
  }
};

inline Batch make_batch(int64_t rows, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  const auto draw = [&] { return torch::randint(0, NetImpl::kVocab, {rows, 6}, generator, torch::kLong); };
  return {draw(), draw()};
}

inline torch::Tensor net_loss(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.to(torch::kFloat).view({-1, logits.size(-1)}), targets.reshape({-1}));
}

using Tensors = std::map<std::string, torch::Tensor>;

/// Gradients by name; parameters without gradient are left out.
inline Tensors plain_gradients(torch::nn::Module& module) {
  Tensors result;
  for (auto& entry : module.named_parameters()) {
    if (entry.value().grad().defined()) result[entry.key()] = entry.value().grad().clone();
  }
  return result;
}

inline Tensors full_gradients(const HSDPModule& module) {
  Tensors result;
  for (auto& [name, gradient] : module.named_grad_dtensors()) result[name] = gradient.full_tensor();
  return result;
}

inline Tensors full_parameters(const HSDPModule& module) {
  Tensors result;
  for (auto& [name, parameter] : module.named_dtensors()) result[name] = parameter.full_tensor();
  return result;
}

[[nodiscard]] inline Tensors times(Tensors tensors, double factor) {
  for (auto& [name, tensor] : tensors) tensor = tensor * factor;
  return tensors;
}

/// Largest difference over the largest magnitude, over all tensors of `want`; names that only one side has count as infinite.
inline double relative_difference(const Tensors& got, const Tensors& want) {
  if (got.size() != want.size()) return INFINITY;
  double worst = 0;
  for (const auto& [name, value] : want) {
    const auto found = got.find(name);
    if (found == got.end() || found->second.sizes() != value.sizes()) return INFINITY;
    if (value.numel() == 0) continue;
    const double scale = value.abs().max().item<double>() + 1e-6;
    worst = std::max(worst, (found->second.to(value.dtype()) - value).abs().max().item<double>() / scale);
  }
  return worst;
}

}  // namespace hyper_parallel::testing
