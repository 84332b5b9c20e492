#pragma once
// What the files of Hugging Face models are read with.
#include <optional>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::hf {

/// Reads values out of JSON whose structure nobody has checked, with errors that name the file. What is null counts as absent.
class JsonReader {
 public:
  using json = nlohmann::json;
  explicit JsonReader(std::string file) : file_(std::move(file)) {}

  [[nodiscard]] const std::string& file() const { return file_; }
  /// CheckpointError: the file is damaged.
  template <class... Args>
  [[noreturn]] void refuse(const Args&... what) const {
    throw CheckpointError(concat("[hf] ", file_, ": ", what...));
  }
  /// ValueError unless what it says is supported.
  template <class... Args>
  void want(bool supported, const Args&... what) const {
    check_value(supported, "hf", file_, ": ", what...);
  }

  [[nodiscard]] static const json* find(const json& from, const char* name) {
    const auto found = from.find(name);
    return found == from.end() || found->is_null() ? nullptr : &*found;
  }
  [[nodiscard]] const json& object(const json& from, const char* name) const {
    const json* value = find(from, name);
    if (value == nullptr || !value->is_object()) refuse("has no object \"", name, "\" where one belongs");
    return *value;
  }
  [[nodiscard]] const json& list(const json& from, const char* name) const {
    const json* value = find(from, name);
    if (value == nullptr || !value->is_array()) refuse("has no list \"", name, "\" where one belongs");
    return *value;
  }
  [[nodiscard]] std::string text(const json& from, const char* name, const std::optional<std::string>& otherwise = {}) const {
    const json* value = find(from, name);
    if (value == nullptr && otherwise) return *otherwise;
    if (value == nullptr) refuse("has no string \"", name, "\" where one belongs");
    if (!value->is_string()) refuse(name, " is ", value->dump(), ", want a string");
    return value->get<std::string>();
  }
  [[nodiscard]] bool flag(const json& from, const char* name, bool otherwise) const {
    const json* value = find(from, name);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) refuse(name, " is ", value->dump(), ", want true or false");
    return value->get<bool>();
  }

 private:
  std::string file_;
};

}  // namespace hyper_parallel::hf
