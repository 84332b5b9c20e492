#pragma once
// Loading a model's state dictionary, in two phases.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <hyper_parallel/state/state_dict.h>

#include "state/model_view.h"
#include "state/values.h"

namespace hyper_parallel::state {

class ModelLoader {
 public:
  ModelLoader(std::string_view op, const ModelRef& model, const ModelStateDict& values, const StateDictOptions& options,
              Comm comm)
      : op_(op), model_(model), values_(values), options_(options), comm_(std::move(comm)) {}
  /// Finds out what goes where; changes nothing. Collective. ValueError on all ranks alike.
  void plan();
  /// Collective.
  void apply();
  [[nodiscard]] const IncompatibleKeys& passed_over() const { return keys_; }

 private:
  /// A name of the tensor under which there is a value; nullptr: there is none.
  [[nodiscard]] const std::string* given(const ModelTensor& tensor) const;
  [[nodiscard]] std::string check();

  std::string op_;
  const ModelRef& model_;
  const ModelStateDict& values_;
  const StateDictOptions& options_;
  Comm comm_;
  ModelView view_;
  std::vector<std::optional<Fit>> fits_;  // by tensor of the view; nullopt: it stays as it is
  IncompatibleKeys keys_;
};

}  // namespace hyper_parallel::state
