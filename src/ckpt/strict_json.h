#pragma once
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace hyper_parallel::ckpt {

/// Parses a JSON document; CheckpointError naming `file` when it is none, is not UTF-8, or has a key twice in one object.
[[nodiscard]] nlohmann::json parse_strictly(std::string_view text, const std::string& file);

/// CheckpointError unless `name` names something directly inside a folder: not empty, no slash, neither "." nor "..".
void check_plain_name(const std::string& name, const std::string& file);

}  // namespace hyper_parallel::ckpt
