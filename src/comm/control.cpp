// Small exchanges of control data: strings, agreement on errors, comparison of plans.
#include <array>
#include <cstring>

#include "comm/comm_impl.h"

namespace hyper_parallel {
namespace {

using Digest = std::array<std::uint64_t, 2>;

// Two FNV-1a hashes with different offsets over all lines and their lengths.
Digest digest(const std::vector<std::string>& lines) {
  Digest out{0xcbf29ce484222325ULL, 0x84222325cbf29ce4ULL};
  const auto add = [&](std::uint64_t value) {
    for (auto& hash : out) hash = (hash ^ value) * 0x100000001b3ULL;
    out[1] ^= out[1] >> 29;
  };
  for (const auto& line : lines) {
    add(0x100 + line.size());
    for (const char c : line) add(static_cast<unsigned char>(c));
  }
  return out;
}

// One fixed-size block of every rank, by group rank.
template <class T>
std::vector<T> exchange(const Comm& comm, const T& mine, const CommOptions& options) {
  auto* allocator = comm.allocator();
  const auto input = byte_buffer(allocator, sizeof(T));
  const auto output = byte_buffer(allocator, static_cast<std::int64_t>(sizeof(T)) * comm.size());
  std::memcpy(input.data_ptr(), &mine, sizeof(T));
  comm.all_gather_single(output, input, options).wait();
  std::vector<T> all(static_cast<std::size_t>(comm.size()));
  std::memcpy(all.data(), output.const_data_ptr(), sizeof(T) * all.size());
  return all;
}

// Errors of the exchange itself name the operation that wanted it.
CommOptions labelled(std::string_view op, const CommOptions& options) {
  return {.label = options.label.empty() ? op : options.label, .timeout = options.timeout};
}

std::string pack(const std::vector<std::string>& lines) {
  std::string out;
  for (const auto& line : lines) {
    const auto size = static_cast<std::uint64_t>(line.size());
    out.append(reinterpret_cast<const char*>(&size), sizeof(size));
    out += line;
  }
  return out;
}

std::vector<std::string> unpack(const std::string& text) {
  std::vector<std::string> out;
  for (std::size_t at = 0; at < text.size();) {
    std::uint64_t size = 0;
    check_internal(text.size() - at >= sizeof(size), "check_same", "cut message");
    std::memcpy(&size, text.data() + at, sizeof(size));
    at += sizeof(size);
    check_internal(text.size() - at >= size, "check_same", "cut message");
    out.push_back(text.substr(at, size));
    at += size;
  }
  return out;
}

}  // namespace

std::vector<std::string> Comm::all_gather_string(const std::string& mine, const CommOptions& options) const {
  const auto count = static_cast<std::size_t>(size());
  const auto sizes = exchange(*this, static_cast<std::int64_t>(mine.size()), options);
  std::int64_t total = 0;
  for (const auto bytes : sizes) total += bytes;
  const auto input = byte_buffer(allocator(), static_cast<std::int64_t>(mine.size()));
  const auto output = byte_buffer(allocator(), total);
  if (!mine.empty()) std::memcpy(input.data_ptr(), mine.data(), mine.size());
  all_gather_v(output, input, sizes, options).wait();
  std::vector<std::string> out(count);
  const auto* at = static_cast<const char*>(output.const_data_ptr());
  for (std::size_t r = 0; r < count; ++r) {
    if (sizes[r] > 0) out[r].assign(at, static_cast<std::size_t>(sizes[r]));
    at += sizes[r];
  }
  return out;
}

void Comm::agree(std::string_view op, const std::string& error, const CommOptions& given) const {
  const auto options = labelled(op, given);
  const auto flags = exchange(*this, static_cast<std::uint8_t>(error.empty() ? 0 : 1), options);
  bool fine = true;
  for (const auto flag : flags) fine = fine && flag == 0;
  if (fine) return;
  const auto texts = all_gather_string(error, options);
  for (std::size_t r = 0; r < texts.size(); ++r) {
    if (!texts[r].empty()) throw Error(concat('[', op, "] ", texts[r], " (rank ", r, '/', texts.size(), ')'));
  }
}

void Comm::check_same(std::string_view op, const std::vector<std::string>& lines, const CommOptions& given) const {
  const auto options = labelled(op, given);
  const auto digests = exchange(*this, digest(lines), options);
  bool equal = true;
  for (const auto& other : digests) equal = equal && other == digests.front();
  if (equal) return;
  const auto packed = all_gather_string(pack(lines), options);
  std::vector<std::vector<std::string>> all;
  all.reserve(packed.size());
  std::size_t longest = 0;
  for (const auto& text : packed) {
    all.push_back(unpack(text));
    longest = std::max(longest, all.back().size());
  }
  const auto version = [&](std::size_t r, std::size_t line) {
    return line < all[r].size() ? concat('"', all[r][line], '"') : std::string("nothing");
  };
  for (std::size_t line = 0; line < longest; ++line) {
    for (std::size_t r = 1; r < all.size(); ++r) {
      const auto mine = version(r, line);
      const auto first = version(0, line);
      check_value(mine == first, op, "ranks disagree, first in line ", line, ": rank 0 has ", first, ", rank ", r, " has ", mine,
                  " (group ", name(), ')');
    }
  }
  throw InternalError(concat('[', op, "] internal: digests differ but lines are equal"));
}

}  // namespace hyper_parallel
