#include <hyper_parallel/train/config.h>

#include <charconv>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <type_traits>

#include <fmt/format.h>
#include <toml++/toml.h>

#include "train/config_fields.h"
#include "train/rope.h"

namespace hyper_parallel::train {
namespace {

std::string at_line(const std::string& name, const toml::source_region& region) {
  return fmt::format("{}:{}", name, region.begin.line);
}

std::string excerpt(const std::string& text) { return text.size() <= 60 ? text : text.substr(0, 57) + "..."; }

std::string text_of(const toml::node& node) {
  std::ostringstream out;
  node.visit([&](const auto& value) { out << value; });
  std::string text = out.str();
  for (char& c : text)
    if (c == '\n') c = ' ';
  return excerpt(text);
}

bool assign_list(std::vector<std::string>& target, const toml::node& node) {
  const toml::array* array = node.as_array();
  if (array == nullptr) return false;
  std::vector<std::string> items;
  for (const toml::node& element : *array) {
    const auto item = element.value_exact<std::string>();
    if (!item) return false;
    items.push_back(*item);
  }
  target = std::move(items);
  return true;
}

// False when the node has another type than the field. Integers are accepted for reals, never the other way round.
bool assign(const Field& field, const toml::node& node) {
  auto exact = [&](auto& target) {
    const auto value = node.value_exact<std::decay_t<decltype(target)>>();
    if (value) target = *value;
    return value.has_value();
  };
  if (auto* real = std::get_if<double*>(&field.value)) {
    if (!node.is_number()) return false;
    **real = *node.value<double>();
    return true;
  }
  if (auto* list = std::get_if<std::vector<std::string>*>(&field.value)) return assign_list(**list, node);
  if (auto* integer = std::get_if<std::int64_t*>(&field.value)) return exact(**integer);
  if (auto* flag = std::get_if<bool*>(&field.value)) return exact(**flag);
  return exact(*std::get<std::string*>(field.value));
}

const Field* find(const std::vector<Field>& fields, std::string_view section, std::string_view key) {
  for (const Field& field : fields)
    if (section == field.section && key == field.key) return &field;
  return nullptr;
}

// The keys of a section, or the sections when `section` is empty.
std::string known(const std::vector<Field>& fields, std::string_view section) {
  std::string list, last;
  for (const Field& field : fields) {
    const std::string item = section.empty() ? field.section : section == field.section ? field.key : "";
    if (item.empty() || item == last) continue;
    list += (list.empty() ? "" : ", ") + item;
    last = item;
  }
  return list;
}

void read_section(Config& config, const std::vector<Field>& fields, std::string_view section, const toml::table& table,
                  const std::string& name) {
  for (const auto& [toml_key, node] : table) {
    const std::string_view key = toml_key.str();
    const std::string where = at_line(name, toml_key.source());
    const Field* field = find(fields, section, key);
    check_value(field != nullptr, "config", "unknown key ", key, " in [", section, "], want one of ", known(fields, section),
                " (", where, ")");
    check_value(assign(*field, node), "config", field->name(), " = ", text_of(node), ", want ", wanted(*field), " (", where, ")");
    check_rule(*field, where);
    config.sources[field->name()] = where;
  }
}

void read_document(Config& config, const std::vector<Field>& fields, const std::string& text, const std::string& name) {
  toml::table document;
  try {
    document = toml::parse(text, name);
  } catch (const toml::parse_error& error) {
    throw ValueError(fmt::format("[config] syntax: {} ({})", error.description(), at_line(name, error.source())));
  }
  for (const auto& [key, node] : document) {
    const std::string_view section = key.str();
    const std::string where = at_line(name, key.source());
    bool exists = false;
    for (const Field& field : fields) exists = exists || section == field.section;
    check_value(exists, "config", "unknown ", node.is_table() ? "section [" : "key ", section,
                node.is_table() ? "]" : " outside any section", ", want the sections ", known(fields, ""), " (", where, ")");
    check_value(node.is_table(), "config", section, " = ", text_of(node), ", want a section [", section, "] (", where, ")");
    read_section(config, fields, section, *node.as_table(), name);
  }
}

std::optional<std::int64_t> step_number(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 1 ? std::optional(value) : std::nullopt;
}

/// One setting that a ZeRO level stands for: set by the level, or to the same value.
template <class T>
void follow_level(const Config& c, const char* key, T& value, const T& meant) {
  const auto text = [](const T& v) {
    if constexpr (std::is_same_v<T, bool>)
      return std::string(v ? "true" : "false");
    else
      return concat('"', v, '"');
  };
  if (!c.sources.contains(key)) value = meant;
  check_value(value == meant, "config", key, " = ", text(value), ", want ", text(meant),
              " or nothing with parallel.zero_level = ", c.parallel.zero_level, " (", c.where(key), ", ",
              c.where("parallel.zero_level"), ")");
}

/// At most one setting says what stays after forward, and none is overruled by another.
void settle_parallel(Config& c) {
  ParallelConfig& p = c.parallel;
  const int ways = (p.reshard_ranks > 0 ? 1 : 0) + (p.memory_budget_mb > 0 ? 1 : 0) + (p.zero_level > 0 ? 1 : 0);
  check_value(ways <= 1, "config", "parallel.reshard_ranks, memory_budget_mb and zero_level all say what stays after forward, ",
              "want one of them (", c.where("parallel.reshard_ranks"), ", ", c.where("parallel.memory_budget_mb"), ", ",
              c.where("parallel.zero_level"), ")");
  for (const auto& [given, key] : {std::pair{p.reshard_ranks > 0, "parallel.reshard_ranks"},
                                   std::pair{p.memory_budget_mb > 0, "parallel.memory_budget_mb"}}) {
    check_value(!given || p.reshard_after_forward, "config", "parallel.reshard_after_forward = false with ", key,
                ", which says how much is freed, want one of them (", c.where("parallel.reshard_after_forward"), ", ",
                c.where(key), ")");
  }
  if (p.zero_level > 0) {
    follow_level(c, "parallel.reshard_after_forward", p.reshard_after_forward, p.zero_level == 3);
    follow_level(c, "parallel.accumulation", p.accumulation, accumulation_of(p));
  }
  for (const auto& [mb, key] :
       {std::pair{p.memory_budget_mb, "parallel.memory_budget_mb"}, std::pair{p.bucket_mb, "parallel.bucket_mb"}})
    check_value(mb == 0 || mb >= 1e-6, "config", key, " = ", mb, ", want 0 or at least 1e-06, one byte (", c.where(key), ")");
  check_value(p.comm_fusion || p.layout == "per_parameter", "config", "parallel.comm_fusion = false, want the layout ",
              "\"per_parameter\" with it: ragged units are always one collective (", c.where("parallel.comm_fusion"), ")");
  check_value(p.comm_fusion || p.bucket_mb == 0, "config",
              "parallel.bucket_mb limits what comm_fusion = false does not make, want one of them (",
              c.where("parallel.bucket_mb"), ", ", c.where("parallel.comm_fusion"), ")");
  check_value(p.dp_shard != 0, "config", "parallel.dp_shard = 0, want -1 or an integer >= 1 (", c.where("parallel.dp_shard"),
              ")");
}

void check_consistency(const Config& c) {
  (void)traced_steps(c);
  try {
    const std::int64_t every = checkpoint_every(c.train.activation_checkpoint);
    check_value(every <= c.model.n_layers, "config", "train.activation_checkpoint = \"", c.train.activation_checkpoint,
                "\", want at most model.n_layers = ", c.model.n_layers, " blocks");
  } catch (const ValueError& error) {
    throw ValueError(concat(error.what(), " (", c.where("train.activation_checkpoint"), ")"));
  }
  const ModelConfig& m = c.model;
  check_value(m.head_dim > 0 || m.dim % m.n_heads == 0, "config", "model.dim = ", m.dim,
              ", want a multiple of model.n_heads = ", m.n_heads, " (", c.where("model.dim"), ")");
  check_value(head_dim_of(m) > 0 && head_dim_of(m) % 2 == 0, "config",
              m.head_dim > 0 ? "model.head_dim = " : "model.dim / model.n_heads = ", head_dim_of(m),
              ", want an even number for the rotary embedding (", c.where(m.head_dim > 0 ? "model.head_dim" : "model.n_heads"),
              ")");
  check_rope(m);
  check_value(m.n_heads % m.n_kv_heads == 0, "config", "model.n_kv_heads = ", m.n_kv_heads,
              ", want a divisor of model.n_heads = ", m.n_heads, " (", c.where("model.n_kv_heads"), ")");
  check_value(m.vocab_size >= 256, "config", "model.vocab_size = ", m.vocab_size,
              ", want at least the 256 tokens of the byte tokenizer (", c.where("model.vocab_size"), ")");
  check_value(c.data.seq_len <= m.max_seq_len, "config", "data.seq_len = ", c.data.seq_len,
              ", want at most model.max_seq_len = ", m.max_seq_len, " (", c.where("data.seq_len"), ")");
  check_value(c.train.max_steps > 0 || c.train.max_seconds > 0, "config",
              "train.max_steps and train.max_seconds are both 0, want at least one limit (", c.where("train.max_steps"), ")");
  check_value(c.optim.optimizer != "sgd" || !c.optim.nesterov || c.optim.momentum > 0, "config",
              "optim.nesterov = true, want optim.momentum above 0 with it, or false (", c.where("optim.momentum"), ")");
  check_value(c.log.name.find('/') == std::string::npos && c.log.name != "." && c.log.name != "..", "config", "log.name = \"",
              c.log.name, "\", want a plain folder name (", c.where("log.name"), ")");
}

}  // namespace

std::int64_t head_dim_of(const ModelConfig& model) { return model.head_dim > 0 ? model.head_dim : model.dim / model.n_heads; }

std::int64_t checkpoint_every(const std::string& text) {
  constexpr std::string_view kEvery = "block:";
  std::int64_t every = text == "none" ? 0 : 1;
  bool known = text == "none" || text == "block";
  if (text.starts_with(kEvery)) {
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data() + kEvery.size(), end, every);
    known = error == std::errc() && rest == end && every >= 1;
  }
  check_value(known, "config", "train.activation_checkpoint = \"", text,
              "\", want none, block, or block:N with an integer N >= 1");
  return every;
}

std::string accumulation_of(const ParallelConfig& parallel) {
  switch (parallel.zero_level) {
    case 1:
      return "local";
    case 2:
      return "partial";
    case 3:
      return "each";
    default:
      return parallel.accumulation;
  }
}

std::string Config::where(const std::string& key) const {
  const auto it = sources.find(key);
  return it == sources.end() ? "default" : it->second;
}

std::pair<std::int64_t, std::int64_t> traced_steps(const Config& config) {
  const std::string_view text = config.train.trace_steps;
  if (text == "all") return {1, std::numeric_limits<std::int64_t>::max()};
  const auto dash = text.find('-');
  const auto first = step_number(text.substr(0, dash));
  const auto last = dash == std::string_view::npos ? first : step_number(text.substr(dash + 1));
  check_value(first && last && *first <= *last, "config", "train.trace_steps = \"", text,
              "\", want a step, a range like 3-5, or all (", config.where("train.trace_steps"), ")");
  return {*first, *last};
}

bool scales_loss(const Config& config) {
  const PrecisionConfig& p = config.precision;
  return p.loss_scale > 0 || p.param_dtype == "float16" || p.reduce_dtype == "float16";
}

std::vector<FieldInfo> describe(const Config& config) {
  Config copy = config;
  std::vector<FieldInfo> infos;
  for (const Field& field : fields_of(copy)) infos.push_back({field.section, field.key, to_toml_value(field), field.help});
  return infos;
}

std::string to_toml(const Config& config) {
  std::string text, section;
  for (const FieldInfo& info : describe(config)) {
    if (info.section != section) text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", info.section);
    section = info.section;
    text += fmt::format("{} = {}  # {}\n", info.key, info.value, info.help);
  }
  return text;
}

void assign_text(const Field& field, const std::string& text, const std::string& where) {
  auto fail = [&] {
    // Digits that are no integer are too many.
    const bool digits = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
    const bool large = digits && std::holds_alternative<std::int64_t*>(field.value);
    throw ValueError(fmt::format("[config] {} = {}, want {} ({})", field.name(), excerpt(text), wanted(field, large), where));
  };
  auto* string = std::get_if<std::string*>(&field.value);
  const bool bare = string != nullptr && (text.empty() || (text.front() != '"' && text.front() != '\''));
  if (bare) {
    **string = text;
  } else {
    try {
      const toml::table document = toml::parse("value = " + text);
      if (document.size() != 1 || !assign(field, *document.get("value"))) fail();
    } catch (const toml::parse_error&) {
      fail();
    }
  }
  check_rule(field, where);
}

Config parse_config(const std::string& text, const std::string& name, const std::vector<Override>& overrides) {
  Config config;
  const std::vector<Field> fields = fields_of(config);
  read_document(config, fields, text, name);
  for (const auto& [key, value] : overrides) {
    const auto dot = key.find('.');
    const std::string section = key.substr(0, dot);
    const Field* field = dot == std::string::npos ? nullptr : find(fields, section, std::string_view(key).substr(dot + 1));
    const std::string keys = known(fields, section);
    check_value(field != nullptr, "config", "unknown key --", key, ", want ",
                keys.empty() ? "--section.key" : concat("one of ", keys), " (command line)");
    assign_text(*field, value, "command line");
    config.sources[key] = "command line";
  }
  if (config.model.n_kv_heads == 0) config.model.n_kv_heads = config.model.n_heads;
  check_consistency(config);
  check_experts(config);
  settle_parallel(config);
  return config;
}

Config load_config(const std::filesystem::path& file, const std::vector<Override>& overrides) {
  if (file.empty()) return parse_config("", "default", overrides);
  std::error_code ignored;
  std::ifstream in(file, std::ios::binary);
  check_value(in.is_open() && !std::filesystem::is_directory(file, ignored), "config", "cannot read ", file.string(),
              ", want a TOML file (command line)");
  std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  return parse_config(text, file.string(), overrides);
}

}  // namespace hyper_parallel::train
