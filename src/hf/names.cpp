// Names of tensors, both ways.
#include <array>
#include <charconv>
#include <string_view>

#include <hyper_parallel/hf/model.h>

#include "ckpt/runs.h"

namespace hyper_parallel::hf {
namespace {

constexpr std::string_view kModel = "model.", kHead = "lm_head.", kExperts = ".mlp.experts.";
constexpr std::string_view kTheirRouter = ".mlp.gate.weight", kOurRouter = ".mlp.router.weight", kWeight = ".weight";
constexpr std::array<std::string_view, 3> kMatrices = {"gate_proj", "up_proj", "down_proj"};

/// Whether `text` is "layers.N" for a number N.
bool is_layer(std::string_view text) {
  if (!text.starts_with("layers.")) return false;
  text.remove_prefix(7);
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

bool is_matrix(std::string_view text) { return text == kMatrices[0] || text == kMatrices[1] || text == kMatrices[2]; }

}  // namespace

std::vector<Part> parts_of(const std::string& name, const std::vector<std::int64_t>& shape) {
  const std::string_view view = name;
  if (view.starts_with(kHead)) return {{name, ckpt::whole_box(shape), shape}};
  if (view.ends_with(kOurRouter) && is_layer(view.substr(0, view.size() - kOurRouter.size()))) {
    const std::string_view layer = view.substr(0, view.size() - kOurRouter.size());
    return {{concat(kModel, layer, kTheirRouter), ckpt::whole_box(shape), shape}};
  }
  const std::size_t at = view.find(kExperts);
  if (at == std::string_view::npos || !is_layer(view.substr(0, at)) || !is_matrix(view.substr(at + kExperts.size())))
    return {{concat(kModel, name), ckpt::whole_box(shape), shape}};
  check_value(shape.size() == 3, "hf", name, " has shape ", ckpt::whole_box(shape).to_string(), ", want (experts, out, in)");
  std::vector<Part> parts;
  for (std::int64_t expert = 0; expert < shape[0]; ++expert) {
    parts.push_back({concat(kModel, view.substr(0, at), kExperts, expert, '.', view.substr(at + kExperts.size()), kWeight),
                     {{expert, 0, 0}, {1, shape[1], shape[2]}},
                     {shape[1], shape[2]}});
  }
  return parts;
}

OurName name_of(const std::string& key) {
  std::string_view view = key;
  if (!view.starts_with(kModel)) return {key, {}};
  view.remove_prefix(kModel.size());
  if (view.ends_with(kTheirRouter) && is_layer(view.substr(0, view.size() - kTheirRouter.size())))
    return {concat(view.substr(0, view.size() - kTheirRouter.size()), kOurRouter), {}};
  const std::size_t at = view.find(kExperts);
  if (at == std::string_view::npos || !is_layer(view.substr(0, at)) || !view.ends_with(kWeight)) return {std::string(view), {}};
  std::string_view rest = view.substr(at + kExperts.size());
  std::int64_t expert = 0;
  const auto [end, problem] = std::from_chars(rest.data(), rest.data() + rest.size(), expert);
  rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
  const bool stacked = problem == std::errc() && expert >= 0 && rest.starts_with('.') && rest.size() > 1 + kWeight.size() &&
                       is_matrix(rest.substr(1, rest.size() - 1 - kWeight.size()));
  if (!stacked) return {std::string(view), {}};
  return {concat(view.substr(0, at), kExperts, rest.substr(1, rest.size() - 1 - kWeight.size())), expert};
}

}  // namespace hyper_parallel::hf
