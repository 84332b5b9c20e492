#include "ckpt/strict_json.h"

#include <set>
#include <vector>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::ckpt {

nlohmann::json parse_strictly(std::string_view text, const std::string& file) {
  using nlohmann::json;
  if (const auto nul = text.find('\0'); nul != std::string_view::npos)  // the parser takes it for the end
    throw CheckpointError(concat("[ckpt] ", file, ": has a NUL byte (offset ", nul, ')'));
  std::vector<std::set<std::string>> keys;
  const auto watch = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
      throw CheckpointError(concat("[ckpt] ", file, ": has ", parsed.dump(), " twice in one object"));
    return true;
  };
  try {
    return json::parse(text, watch);
  } catch (const json::exception& error) {
    std::string_view reason = error.what();
    if (const auto bracket = reason.find("] "); bracket != std::string_view::npos) reason.remove_prefix(bracket + 2);
    throw CheckpointError(concat("[ckpt] ", file, ": is no JSON or not UTF-8: ", reason));
  }
}

void check_plain_name(const std::string& name, const std::string& file) {
  if (name.empty() || name == "." || name == ".." || name.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos)
    throw CheckpointError(
        concat("[ckpt] ", file, ": names the file ", nlohmann::json(name).dump(), ", want a plain name inside its folder"));
}

}  // namespace hyper_parallel::ckpt
