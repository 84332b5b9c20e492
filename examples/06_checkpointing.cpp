// Activation checkpointing: blocks keep their input alone and run again in backward. Same gradients, bit for bit, less memory.
//   torchrun --standalone --no-python --nproc-per-node 2 build/examples/06_checkpointing
#include <iostream>
#include <set>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

namespace hp = hyper_parallel;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t dim) {
    wide = register_module("wide", torch::nn::Linear(dim, 4 * dim));
    narrow = register_module("narrow", torch::nn::Linear(4 * dim, dim));
  }
  torch::Tensor forward(torch::Tensor x) {
    ++runs;
    return x + torch::dropout(narrow(torch::gelu(wide(x))), 0.1, is_training());
  }
  torch::nn::Linear wide{nullptr}, narrow{nullptr};
  int runs = 0;
};
HP_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    for (int i = 0; i < 6; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block(64)));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : blocks) x = checkpointed ? hp::checkpoint(block, x) : block(x);
    return x;
  }
  std::vector<Block> blocks;
  bool checkpointed = false;
};
HP_MODULE(Model);

/// Size of the graph below `result`, whose nodes hold the activations.
int64_t nodes_below(const torch::Tensor& result) {
  std::vector<torch::autograd::Node*> open = {result.grad_fn().get()};
  std::set<torch::autograd::Node*> seen;
  while (!open.empty()) {
    torch::autograd::Node* node = open.back();
    open.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    for (const auto& edge : node->next_edges()) open.push_back(edge.function.get());
  }
  return static_cast<int64_t>(seen.size());
}

int main() {
  hp::init_process_group();
  torch::manual_seed(0);
  Model model;
  for (auto& block : model->blocks) hp::fully_shard(block);
  hp::HSDPModule root = hp::fully_shard(model);
  const auto x = torch::randn({32, 64}) + hp::get_rank();

  std::vector<torch::Tensor> gradients;
  int64_t nodes[2] = {0, 0};
  bool same = true;
  for (const bool checkpointed : {false, true}) {
    model->checkpointed = checkpointed;
    torch::manual_seed(1 + hp::get_rank());  // the same dropout, drawn once in each run
    const auto loss = model(x).square().mean();
    nodes[checkpointed] = nodes_below(loss);
    loss.backward();
    for (std::size_t i = 0; i < model->parameters().size(); ++i) {
      const auto gradient = model->parameters()[i].grad();
      if (!checkpointed) gradients.push_back(gradient.clone());
      same = same && torch::equal(gradient, gradients[i]);
    }
    root.zero_grad();
  }
  const int runs = model->blocks[0]->runs;
  std::cout << hp::concat("rank ", hp::get_rank(), ": gradients ", same ? "are equal" : "DIFFER", ", graph of ", nodes[0],
                          " nodes without and ", nodes[1], " with checkpoints, block 0 ran ", runs, " times\n");
  hp::destroy_process_group();
  return same && nodes[1] < nodes[0] && runs == 3 ? 0 : 1;
}
