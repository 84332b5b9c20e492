#include <hyper_parallel/train/sampler.h>

#include <bit>

namespace hyper_parallel::train {
namespace {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

Permutation::Permutation(std::uint64_t n, std::uint64_t seed) : n_(n) {
  const int bits = n > 1 ? std::bit_width(n - 1) : 1;
  half_bits_ = (bits + 1) / 2;
  for (std::uint64_t& key : keys_) key = seed = mix(seed);
}

std::uint64_t Permutation::operator()(std::uint64_t i) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  do {
    std::uint64_t left = i >> half_bits_, right = i & mask;
    for (const std::uint64_t key : keys_) {
      const std::uint64_t next = left ^ (mix(right ^ key) & mask);
      left = right;
      right = next;
    }
    i = left << half_bits_ | right;
  } while (i >= n_);
  return i;
}

Splits split_tokens(std::int64_t tokens, double validation_fraction) {
  const auto held = static_cast<std::int64_t>(static_cast<double>(tokens) * validation_fraction);
  return {.train = {0, tokens - held}, .validation = {tokens - held, tokens}};
}

WindowSampler::WindowSampler(std::int64_t windows, std::uint64_t seed)
    : windows_(windows), seed_(seed), permutation_(static_cast<std::uint64_t>(windows), mix(seed)) {
  check_value(windows > 0, "data", "sampler of ", windows, " windows, want at least 1");
}

std::int64_t WindowSampler::at(std::int64_t position) {
  const std::int64_t epoch = position / windows_;
  if (epoch != epoch_) {
    epoch_ = epoch;
    permutation_ = Permutation(static_cast<std::uint64_t>(windows_), mix(seed_) + static_cast<std::uint64_t>(epoch));
  }
  return static_cast<std::int64_t>(permutation_(static_cast<std::uint64_t>(position % windows_)));
}

std::vector<std::int64_t> WindowSampler::next(int rank, int world, std::int64_t per_rank) {
  check_value(rank >= 0 && rank < world && per_rank > 0, "data", "next of rank ", rank, "/", world, " with ", per_rank,
              " windows");
  std::vector<std::int64_t> windows;
  for (std::int64_t i = 0; i < per_rank; ++i) windows.push_back(at(position_ + rank * per_rank + i));
  position_ += world * per_rank;
  return windows;
}

void WindowSampler::seek(std::int64_t position) {
  check_value(position >= 0, "data", "seek to ", position, ", want >= 0");
  position_ = position;
}

}  // namespace hyper_parallel::train
