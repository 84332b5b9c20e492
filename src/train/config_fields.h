#pragma once
// The one list of what a configuration can set: reading, writing, help and checks all walk it.
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <hyper_parallel/train/config.h>

namespace hyper_parallel::train {

/// What a value must be. Numbers: min <= value <= max (min < value when `above`); strings: one of `choices` when there are any.
struct Rule {
  double min = -std::numeric_limits<double>::max();
  double max = std::numeric_limits<double>::max();
  bool above = false;
  std::vector<std::string_view> choices = {};
  bool not_empty = false;
};

struct Field {
  const char* section;
  const char* key;
  std::variant<std::int64_t*, double*, bool*, std::string*, std::vector<std::string>*> value;
  const char* help;
  Rule rule = {};
  [[nodiscard]] std::string name() const { return concat(section, '.', key); }
};

/// Fields of `config`, section by section; the pointers point into it.
[[nodiscard]] std::vector<Field> fields_of(Config& config);
/// The field's value as TOML.
[[nodiscard]] std::string to_toml_value(const Field& field);
/// "an integer >= 1", "one of ragged, per_parameter". \param limits names the largest integer, which few need to know
[[nodiscard]] std::string wanted(const Field& field, bool limits = false);
/// ValueError unless the field's value obeys its rule.
void check_rule(const Field& field, const std::string& where);
/// Sets the field from text (command line): numbers and booleans as in TOML, strings bare or quoted, lists as in TOML.
void assign_text(const Field& field, const std::string& text, const std::string& where);
/// ValueError where the settings of experts and of [parallel] tp, cp and ep contradict each other.
void check_experts(const Config& config);

}  // namespace hyper_parallel::train
