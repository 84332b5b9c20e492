#pragma once
// The Python side of the hf tests.
#include <chrono>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/process.h"

namespace hyper_parallel::testing {

/// Runs hf_peer.py; its exit code. \param output what it printed
inline int run_hf_peer(const std::vector<std::string>& arguments, std::string* output = nullptr) {
  std::vector<std::string> all = {HP_HF_PEER};
  all.insert(all.end(), arguments.begin(), arguments.end());
  Process process(HP_PYTHON, all, {{"OMP_NUM_THREADS", "1"}, {"HF_HUB_OFFLINE", "1"}, {"TRANSFORMERS_VERBOSITY", "error"}});
  const int code = process.wait(std::chrono::seconds(200));
  if (output != nullptr) *output = process.output();
  if (code != 0) ADD_FAILURE() << "hf_peer.py " << arguments[0] << " ended with " << code << "\n" << process.output();
  return code;
}

}  // namespace hyper_parallel::testing
