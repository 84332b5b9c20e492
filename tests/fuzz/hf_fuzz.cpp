// Fuzz target for tokenizer.json and config.json: a libFuzzer program, or one that takes files.
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "support/mutate_json.h"
#include "support/temp_folder.h"

#ifdef HP_LIBFUZZER
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  (void)hyper_parallel::testing::read_json_anything({reinterpret_cast<const char*>(data), size});
  return 0;
}
#else
int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const bool valid = hyper_parallel::testing::read_json_anything(hyper_parallel::testing::file_text(argv[i]));
    std::printf("%s: %s\n", argv[i], valid ? "valid" : "refused");
  }
}
#endif
