// The autograd node of a checkpointed segment; see docs/design/010-checkpointing.md.
#include <hyper_parallel/nn/checkpoint.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include <ATen/SequenceNumber.h>
#include <ATen/ops/alias.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <hyper_parallel/core/error.h>

#include "fsdp/runtime.h"
#include "fsdp/segment.h"
#include "fsdp/unit_impl.h"
#include "fsdp/unit_node.h"
#include "nn/call_context.h"

namespace hyper_parallel::nn::detail {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

constexpr std::string_view kOp = "checkpoint";

// ---- The graph of a segment: its nodes are those that this thread made while fn ran.

class NodeRange {
 public:
  NodeRange() : begin_(at::sequence_number::peek()), thread_(at::RecordFunction::currentThreadId()) {}
  void close() { end_ = at::sequence_number::peek(); }
  [[nodiscard]] bool contains(const Node* node) const {
    return node != nullptr && node->thread_id() == thread_ && node->sequence_nr() >= begin_ && node->sequence_nr() < end_;
  }

 private:
  std::uint64_t begin_, end_ = 0, thread_;
};

/// Where the graph of a segment ends: at parameters, inputs, captured tensors.
struct Boundary {
  struct Exit {
    Node* from;
    std::size_t index;  ///< of the edge in `from`
    std::size_t end;    ///< of what it leads to in `ends`
  };
  edge_list ends;  ///< distinct, in an order that depends on the graph alone and so is the same on all ranks
  std::vector<Exit> exits;
};

Boundary boundary_of(const edge_list& roots, const NodeRange& range) {
  Boundary boundary;
  std::unordered_map<Edge, std::size_t> known;
  std::unordered_set<Node*> seen;
  std::vector<Node*> open;
  const auto visit = [&](Node* node) {
    if (seen.insert(node).second) open.push_back(node);
  };
  for (const Edge& root : roots) visit(root.function.get());
  while (!open.empty()) {
    Node* node = open.back();
    open.pop_back();
    for (std::size_t i = 0; i < node->next_edges().size(); ++i) {
      const Edge& edge = node->next_edges()[i];
      if (!edge.is_valid()) continue;
      if (range.contains(edge.function.get())) {
        visit(edge.function.get());
        continue;
      }
      const auto [entry, added] = known.emplace(edge, boundary.ends.size());
      if (added) boundary.ends.push_back(edge);
      boundary.exits.push_back({node, i, entry->second});
    }
  }
  return boundary;
}

/// Stands for everything outside of the recomputed graph, and keeps what arrives.
struct Sink : Node {
  Sink() : Node(edge_list{}) {}
  variable_list apply(variable_list&& gradients) override {
    arrived = std::move(gradients);
    return {};
  }
  std::string name() const override { return "HyperParallelCheckpointSink"; }
  variable_list arrived;
};

/// While the gradients of these units are inside of a segment, the engine does not take them for absent.
class UnitsInBackward {
 public:
  explicit UnitsInBackward(const edge_list& boundary) {
    for (const Edge& edge : boundary) {
      const auto* node = dynamic_cast<const fsdp::UnitNode*>(edge.function.get());
      if (node == nullptr) continue;
      if (auto unit = node->unit()) units_.push_back(std::move(unit));
    }
    for (const auto& unit : units_) ++unit->segments_in_backward;
  }
  ~UnitsInBackward() {
    for (const auto& unit : units_) --unit->segments_in_backward;
  }
  UnitsInBackward(const UnitsInBackward&) = delete;
  UnitsInBackward& operator=(const UnitsInBackward&) = delete;

 private:
  std::vector<std::shared_ptr<fsdp::Unit>> units_;
};

// ---- What the backward needs of a segment.

struct KeptInput {
  at::Tensor tensor;
  std::optional<std::int64_t> version;  ///< none for undefined tensors and those of inference mode
};

std::optional<std::int64_t> version_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_inference()) return std::nullopt;
  return tensor._version();
}

void check_unchanged(const std::vector<KeptInput>& inputs, const char* what) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_value(version_of(inputs[i].tensor) == inputs[i].version, kOp, "input tensor ", i, what,
                ", want it unchanged until its backward, which computes from it again: change a clone instead");
  }
}

std::string to_string(const at::TensorOptions& options, at::IntArrayRef sizes) {
  return concat(options.dtype().name(), ' ', sizes, " on ", options.device());
}

struct KeptOutput {
  bool defined = false;
  at::TensorOptions options;
  std::vector<std::int64_t> sizes;
  int node_input = -1;  ///< of the checkpoint's node; -1 for what needs no gradient or is no result of the segment

  [[nodiscard]] std::string text() const { return defined ? to_string(options, sizes) : "an undefined tensor"; }
};

KeptOutput describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {.defined = true, .options = tensor.options(), .sizes = tensor.sizes().vec()};
}

struct Segment {
  Rerun rerun;
  std::vector<KeptInput> inputs;
  std::vector<KeptOutput> outputs;
  CallContext context;
  edge_list ends;              ///< of the segment's graph: the next edges of the node
  std::size_t own_leaves = 0;  ///< further ends: leaves that fn makes, whose gradients nobody sees

  /// fn once more. Gives the roots of its graph by input of the node.
  [[nodiscard]] edge_list recompute(NodeRange& range) const;
  void check_same(const std::vector<at::Tensor>& again) const;
  /// Position in `ends` of each end of the recomputed graph; none for leaves that fn makes.
  [[nodiscard]] std::vector<std::optional<std::size_t>> match(const Boundary& again) const;
};

constexpr const char* kWant =
    "; want fn to compute the same again: no state that a call changes, no data that changes in between, "
    "random numbers only from generators that the checkpoint knows";

void Segment::check_same(const std::vector<at::Tensor>& again) const {
  check_value(again.size() == outputs.size(), kOp, "the recomputation gave ", again.size(), " tensors, the forward ",
              outputs.size(), kWant);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const KeptOutput now = describe(again[i]), &before = outputs[i];
    const bool same =
        now.defined == before.defined && now.sizes == before.sizes &&
        (!now.defined || (now.options.dtype() == before.options.dtype() && now.options.device() == before.options.device()));
    check_value(same, kOp, "the recomputation gave output ", i, " as ", now.text(), ", the forward as ", before.text(), kWant);
  }
}

std::vector<std::optional<std::size_t>> Segment::match(const Boundary& again) const {
  std::unordered_map<Edge, std::size_t> known;
  for (std::size_t i = 0; i < ends.size(); ++i) known.emplace(ends[i], i);
  std::vector<std::optional<std::size_t>> places;
  std::size_t leaves = 0, strangers = 0;
  for (const Edge& edge : again.ends) {
    if (const auto entry = known.find(edge); entry != known.end()) {
      places.emplace_back(entry->second);
      continue;
    }
    places.emplace_back();
    (dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get()) != nullptr ? leaves : strangers) += 1;
  }
  check_value(strangers == 0 && leaves == own_leaves && again.ends.size() == ends.size() + leaves, kOp,
              "the results of the recomputation depend on ", again.ends.size(), " parameters and inputs, ",
              again.ends.size() - leaves - strangers, " of them among the ", ends.size() + own_leaves, " of the forward", kWant);
  return places;
}

edge_list Segment::recompute(NodeRange& range) const {
  const at::AutoGradMode with_grad(true);
  const ContextGuard as_in_forward(context);
  range = NodeRange();
  std::vector<at::Tensor> given;
  for (const KeptInput& input : inputs) {
    // As an alias: a hook that fn puts on its input is one of this recomputation.
    const at::Tensor& tensor = input.tensor;
    given.push_back(tensor.defined() && tensor.requires_grad() ? at::alias(tensor) : tensor);
  }
  const std::vector<at::Tensor> again = rerun(given);
  check_same(again);
  edge_list roots;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].node_input >= 0) roots.push_back(torch::autograd::impl::gradient_edge(again[i]));
  }
  range.close();
  for (const Edge& root : roots)
    check_value(range.contains(root.function.get()), kOp,
                "an output of the recomputation needs no gradient, that of the forward did", kWant);
  return roots;
}

class CheckpointNode : public Node {
 public:
  explicit CheckpointNode(std::shared_ptr<const Segment> segment) : segment_(std::move(segment)) {
    set_next_edges(edge_list(segment_->ends));
  }

  variable_list apply(variable_list&& gradients) override {
    std::shared_ptr<const Segment> segment;
    {
      const std::lock_guard lock(mutex_);
      segment = segment_;
    }
    check_value(segment != nullptr, kOp, "backward a second time through a checkpoint that the first one has freed, ",
                "want retain_graph = true in the first");
    check_value(!at::GradMode::is_enabled(), kOp,
                "backward with create_graph = true, want false: ", "derivatives of gradients do not pass a checkpoint");
    check_unchanged(segment->inputs, " was changed in place after the forward");
    return backward(*segment, std::move(gradients));
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    segment_.reset();
  }

  std::string name() const override { return "HyperParallelCheckpoint"; }

 private:
  variable_list backward(const Segment& segment, variable_list gradients) const {
    variable_list result(segment.ends.size());
    if (std::none_of(gradients.begin(), gradients.end(), [](const at::Tensor& g) { return g.defined(); })) return result;

    const UnitsInBackward units(segment.ends);
    NodeRange range;
    edge_list roots = segment.recompute(range);
    const Boundary again = boundary_of(roots, range);
    const std::vector<std::optional<std::size_t>> places = segment.match(again);

    // Gradients stop where the segment ends: what lies beyond, units above all, runs in the outer backward, once, with the sum.
    const auto sink = c10::make_intrusive<Sink>();
    for (const Edge& edge : again.ends) {
      const torch::autograd::InputMetadata& end = edge.function->input_metadata(edge.input_nr);
      sink->add_input_metadata(end.options(), end.shape_as_dim_vector(), end.is_tensor_subclass(), end.is_nested_tensor(),
                               end.grad_dtype());
    }
    for (const Boundary::Exit& exit : again.exits) {
      const bool needed = places[exit.end] && task_should_compute_output(*places[exit.end]);
      exit.from->next_edges()[exit.index] = needed ? Edge(sink, static_cast<std::uint32_t>(exit.end)) : Edge();
    }
    variable_list given;
    edge_list from;
    for (std::size_t i = 0; i < roots.size(); ++i) {
      if (!gradients[i].defined()) continue;
      from.push_back(std::move(roots[i]));
      given.push_back(std::move(gradients[i]));
    }
    roots.clear();
    torch::autograd::Engine::get_default_engine().execute(from, given, /*keep_graph=*/false, /*create_graph=*/false,
                                                          /*accumulate_grad=*/true);
    for (std::size_t i = 0; i < sink->arrived.size(); ++i) {
      if (places[i]) result[*places[i]] = std::move(sink->arrived[i]);
    }
    return result;
  }

  std::shared_ptr<const Segment> segment_;
};

}  // namespace

struct CheckpointForward::State {
  Segment segment;
  fsdp::SegmentScope units;
  std::optional<NoAutocastCache> no_cache;
  NodeRange range;
};

CheckpointForward::CheckpointForward(const CheckpointOptions& options, std::vector<at::Tensor> inputs)
    : state_(std::make_unique<State>()) {
  Segment& segment = state_->segment;
  segment.context = present_context(options.generators, options.preserve_rng_state, inputs);
  for (at::Tensor& input : inputs) {
    const auto version = version_of(input);
    segment.inputs.push_back({std::move(input), version});
  }
  state_->no_cache.emplace();
  state_->range = NodeRange();
}

CheckpointForward::~CheckpointForward() = default;

namespace {

/// Tells each tree of units which of them will run again together.
void remember(const std::vector<std::shared_ptr<fsdp::Unit>>& units) {
  std::vector<std::pair<fsdp::Runtime*, std::vector<fsdp::Unit*>>> trees;
  for (const auto& unit : units) {
    auto tree = std::find_if(trees.begin(), trees.end(), [&](const auto& entry) { return entry.first == &unit->runtime(); });
    if (tree == trees.end()) tree = trees.insert(tree, {&unit->runtime(), {}});
    tree->second.push_back(unit.get());
  }
  for (const auto& [runtime, members] : trees) runtime->remember_segment(members);
}

}  // namespace

void CheckpointForward::finish(const std::vector<at::Tensor*>& outputs, Rerun rerun) {
  Segment& segment = state_->segment;
  NodeRange& range = state_->range;
  state_->no_cache.reset();
  check_unchanged(segment.inputs, " was changed in place by fn");

  edge_list edges;
  for (const at::Tensor* output : outputs) {
    segment.outputs.push_back(describe(*output));
    edges.push_back(output->defined() && output->requires_grad() ? torch::autograd::impl::gradient_edge(*output) : Edge());
  }
  range.close();
  edge_list roots;
  for (std::size_t i = 0; i < edges.size(); ++i) {
    // The rest has its gradient, if any, outside of this segment: inputs and parameters passed through.
    if (!range.contains(edges[i].function.get())) continue;
    segment.outputs[i].node_input = static_cast<int>(roots.size());
    roots.push_back(std::move(edges[i]));
  }
  if (roots.empty()) return;
  segment.ends = boundary_of(roots, range).ends;
  segment.rerun = std::move(rerun);
  remember(state_->units.units());

  // The last owners of the graph go: outputs are replaced by tensors that share only their values.
  edges.clear();
  roots.clear();
  std::vector<at::Tensor> replaced(outputs.size());
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (segment.outputs[i].node_input < 0) continue;
      replaced[i] = outputs[i]->detach();
      outputs[i]->reset();
    }
  }
  segment.own_leaves = std::erase_if(segment.ends, [](const Edge& edge) {
    const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(edge.function.get());
    return leaf != nullptr && leaf->variable.use_count() == 1;
  });

  const auto node = c10::make_intrusive<CheckpointNode>(std::make_shared<const Segment>(std::move(segment)));
  state_->units.attach_to(*node);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!replaced[i].defined()) continue;
    const std::uint32_t input = node->add_input_metadata(replaced[i]);
    torch::autograd::impl::set_gradient_edge(replaced[i], Edge(node, input));
    *outputs[i] = std::move(replaced[i]);
  }
  state_.reset();
}

}  // namespace hyper_parallel::nn::detail
