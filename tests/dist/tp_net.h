#pragma once
// A small network written for tensor parallelism by hand, on autograd functions over Comm: embedding and head share one table
// that is cut along the vocabulary, columns and rows of the blocks are cut along the hidden width. Without a communicator it is
// the plain network.
#include <map>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/small_net.h"

namespace hyper_parallel::testing {

/// Whose gradients the boundaries make.
enum class Convention {
  kWhole,   ///< each rank those of the one loss that all have (identity where the forward adds, a sum where it copies)
  kSummed,  ///< each rank those of the sum of all ranks' losses (the adjoint of each communication)
};

/// What the boundaries need to know. One for each model; set when it is cut.
struct TpContext {
  Comm comm;  ///< undefined: not cut
  Convention convention = Convention::kWhole;
  [[nodiscard]] int size() const { return comm.defined() ? comm.size() : 1; }
  [[nodiscard]] int rank() const { return comm.defined() ? comm.rank() : 0; }
};

inline torch::Tensor summed(const torch::Tensor& x, const Comm& comm) {
  torch::Tensor sum = x.contiguous().clone();
  comm.all_reduce(sum, {.label = "boundary"}).wait();
  return sum;
}

/// Chunk of a dimension in ceil chunks.
inline torch::Tensor own_chunk(const torch::Tensor& x, int64_t dim, const TpContext& tp) {
  const int64_t each = (x.size(dim) + tp.size() - 1) / tp.size(), begin = std::min(tp.rank() * each, x.size(dim));
  return x.narrow(dim, begin, std::min(each, x.size(dim) - begin));
}

/// A replicated tensor goes to work that every rank does a part of.
struct CopyIn : torch::autograd::Function<CopyIn> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, TpContext* tp) {
    context->saved_data["tp"] = reinterpret_cast<int64_t>(tp);
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto* tp = reinterpret_cast<TpContext*>(context->saved_data["tp"].toInt());
    return {tp->convention == Convention::kWhole ? summed(grads[0], tp->comm) : grads[0], {}};
  }
};

/// Summands of all ranks become their sum on every rank.
struct SumOut : torch::autograd::Function<SumOut> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, TpContext* tp) {
    context->saved_data["tp"] = reinterpret_cast<int64_t>(tp);
    return summed(x, tp->comm);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto* tp = reinterpret_cast<TpContext*>(context->saved_data["tp"].toInt());
    return {tp->convention == Convention::kWhole ? grads[0] : summed(grads[0], tp->comm), {}};
  }
};

/// Chunks of all ranks, uneven ones too, become the whole on every rank.
struct GatherOut : torch::autograd::Function<GatherOut> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, int64_t dim, int64_t size,
                               TpContext* tp) {
    context->saved_data["tp"] = reinterpret_cast<int64_t>(tp);
    context->saved_data["dim"] = dim;
    std::vector<int64_t> shape = x.sizes().vec();
    shape[static_cast<std::size_t>(dim)] = size;
    torch::Tensor whole = torch::zeros(shape, x.options());
    own_chunk(whole, dim, *tp).copy_(x);
    tp->comm.all_reduce(whole, {.label = "boundary"}).wait();
    return whole;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto* tp = reinterpret_cast<TpContext*>(context->saved_data["tp"].toInt());
    const torch::Tensor grad = tp->convention == Convention::kWhole ? grads[0] : summed(grads[0], tp->comm);
    return {own_chunk(grad, context->saved_data["dim"].toInt(), *tp), {}, {}, {}};
  }
};

/// The own chunk of a replicated tensor.
struct CutIn : torch::autograd::Function<CutIn> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, int64_t dim, TpContext* tp) {
    context->saved_data["tp"] = reinterpret_cast<int64_t>(tp);
    context->saved_data["dim"] = dim;
    context->saved_data["shape"] = x.sizes().vec();
    return own_chunk(x, dim, *tp).clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto* tp = reinterpret_cast<TpContext*>(context->saved_data["tp"].toInt());
    torch::Tensor whole = torch::zeros(context->saved_data["shape"].toIntVector(), grads[0].options());
    own_chunk(whole, context->saved_data["dim"].toInt(), *tp).copy_(grads[0]);
    return {tp->convention == Convention::kWhole ? summed(whole, tp->comm) : whole, {}, {}};
  }
};

/// x + row(silu(column(norm * x))), and a norm that each rank applies to its chunk of the tokens only.
struct TpBlockImpl : torch::nn::Module {
  TpBlockImpl(int64_t dim, int64_t hidden, TpContext* context) : tp(context) {
    norm = register_parameter("norm", torch::ones({dim}));
    a = register_parameter("a", torch::empty({hidden, dim}));
    a_bias = register_parameter("a_bias", torch::empty({hidden}));
    b = register_parameter("b", torch::empty({dim, hidden}));
    b_bias = register_parameter("b_bias", torch::empty({dim}));
    scale = register_parameter("scale", torch::tensor(0.5F));
    token_norm = register_parameter("token_norm", torch::ones({dim}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const bool cut = tp->comm.defined();
    torch::Tensor h = x * norm;
    if (cut) h = CopyIn::apply(h, tp);
    h = torch::matmul(torch::silu(torch::matmul(h, a.t()) + a_bias), b.t());
    if (cut) h = SumOut::apply(h, tp);
    h = x + scale * (h + b_bias);
    torch::Tensor tokens = cut ? CutIn::apply(h, 1, tp) : h;
    tokens = torch::tanh(tokens * token_norm);
    return cut ? GatherOut::apply(tokens, 1, h.size(1), tp) : tokens;
  }
  TpContext* tp;
  torch::Tensor norm, a, a_bias, b, b_bias, scale, token_norm;
};
HP_MODULE(TpBlock);

struct TpNetImpl : torch::nn::Module, SourceBoundary {
  static constexpr int64_t kDim = 10, kVocab = 11;
  explicit TpNetImpl(std::vector<int64_t> hidden = {8, 7}) {
    table = register_parameter("table", torch::empty({kVocab, kDim}));
    head = register_parameter("head", table);
    for (std::size_t i = 0; i < hidden.size(); ++i)
      blocks.push_back(register_module(concat("block", i), TpBlock(kDim, hidden[i], &tp)));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    torch::Tensor h;
    if (tp.comm.defined()) {
      const int64_t each = (kVocab + tp.size() - 1) / tp.size(), begin = std::min(tp.rank() * each, kVocab);
      const torch::Tensor mine = (tokens >= begin) & (tokens < begin + table.size(0));
      const torch::Tensor rows =
          torch::nn::functional::embedding(torch::where(mine, tokens - begin, torch::zeros_like(tokens)), table);
      h = SumOut::apply(rows * mine.unsqueeze(-1), &tp);
    } else {
      h = torch::nn::functional::embedding(tokens, table);
    }
    for (TpBlock& block : blocks) h = block(h);
    if (!tp.comm.defined()) return torch::matmul(h, head.t());
    return GatherOut::apply(torch::matmul(CopyIn::apply(h, &tp), head.t()), 2, kVocab, &tp);
  }
  void bind_source(const SourceBinding& binding) override {
    bound = binding;
    tp.comm = binding.meshes.dense.get_group(std::int64_t{0});
  }
  SourceBinding bound;
  TpContext tp;
  torch::Tensor table, head;
  std::vector<TpBlock> blocks;
};
HP_MODULE(TpNet);

/// What tensor parallelism does to a parameter of the net, by the last part of its name.
inline Placement tp_placement(const std::string& name) {
  static const std::map<std::string, Placement> cuts = {
      {"table", Shard(0)}, {"head", Shard(0)}, {"a", Shard(0)}, {"a_bias", Shard(0)}, {"b", Shard(-1)}};
  const auto found = cuts.find(name.substr(name.rfind('.') + 1));
  return found == cuts.end() ? Replicate() : found->second;
}

/// Cuts the whole parameters of a net and tells how. With kWhole, only the norm of the tokens has partial gradients.
inline SourceShardInfos cut_net(TpNet net, const DeviceMesh& tp, Convention convention) {
  SourceShardInfos infos;
  for (auto& entry : net->named_parameters()) {
    torch::Tensor& parameter = entry.value();
    if (infos.find(parameter) != nullptr) continue;  // the table has two names
    const std::vector<Placement> placements = {tp_placement(entry.key())};
    SourceShardMetaInfo info{.mesh = tp, .placements = placements, .shape = parameter.sizes().vec()};
    if (convention == Convention::kWhole && entry.key().ends_with("token_norm")) info.copy_gradients = {CopyGradient::kPartial};
    if (parameter.dim() > 0) parameter.set_data(distribute_tensor(parameter.detach(), tp, placements).to_local());
    infos.set(parameter, info, entry.key());
  }
  net->tp = {tp.get_group(std::int64_t{0}), convention};
  return infos;
}

/// The entries of those parameters that a module registers itself or below.
inline SourceShardInfos entries_of(torch::nn::Module& module, const SourceShardInfos& all, bool recurse = true) {
  SourceShardInfos entries;
  for (auto& entry : module.named_parameters(recurse)) {
    if (const auto* known = all.find(entry.value())) entries.set(entry.value(), known->info, known->name);
  }
  return entries;
}

inline HSDPModule shard_tp_net(TpNet net, FullyShardOptions options, const SourceShardInfos& infos) {
  for (TpBlock& block : net->blocks) {
    options.source_shard_infos = entries_of(*block, infos);
    fully_shard(block, options);
  }
  options.source_shard_infos = entries_of(*net, infos, false);
  return fully_shard(net, options);
}

inline TpNet make_tp_net() {
  TpNet net(std::vector<int64_t>{8, 7});
  seed_parameters(*net, 3);
  return net;
}

inline torch::Tensor loss_of(TpNet net, int part) {
  const Batch batch = make_batch(2, 70 + static_cast<uint64_t>(part));
  return torch::nn::functional::cross_entropy(net(batch.tokens).flatten(0, 1), batch.targets.flatten());
}

}  // namespace hyper_parallel::testing
