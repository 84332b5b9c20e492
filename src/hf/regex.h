#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace hyper_parallel::hf {

/// A regular expression of Oniguruma, which is what the Python package `tokenizers` matches with. A cheap handle. Thread safety:
/// any thread.
class Regex {
 public:
  /// CheckpointError naming `file`: it is none.
  Regex(const std::string& pattern, const std::string& file);
  /// An expression for exactly this text.
  [[nodiscard]] static Regex literal(std::string_view text, const std::string& file);

  struct Span {
    std::size_t begin = 0, end = 0;
    bool match = false;
  };
  /// The matches in `text` and what lies between them, in order; no empty ones. Error: the search gives up.
  [[nodiscard]] std::vector<Span> split(std::string_view text) const;

 private:
  struct Compiled;
  std::shared_ptr<const Compiled> compiled_;
};

}  // namespace hyper_parallel::hf
