#pragma once
// Text in columns.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::plan {

using Row = std::vector<std::string>;

inline std::string text_of(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t size : shape) text += concat(text.empty() ? "" : ", ", size);
  return concat('[', text, ']');
}

/// Columns as wide as their widest entry, no spaces at the end of lines.
inline std::string table(const std::vector<Row>& rows) {
  std::vector<std::size_t> widths;
  for (const Row& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t column = 0; column < row.size(); ++column) widths[column] = std::max(widths[column], row[column].size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (std::size_t column = 0; column < row.size(); ++column)
      line += row[column] + std::string(widths[column] + 2 - row[column].size(), ' ');
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

}  // namespace hyper_parallel::plan
