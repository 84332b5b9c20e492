# One precompiled torch/torch.h for examples, apps, tests and benchmarks.
file(WRITE ${PROJECT_BINARY_DIR}/hp_torch_pch.cpp "")
add_library(hp_torch_pch OBJECT ${PROJECT_BINARY_DIR}/hp_torch_pch.cpp)
target_link_libraries(hp_torch_pch PUBLIC hyper_parallel)
target_precompile_headers(hp_torch_pch PRIVATE <torch/torch.h>)
hp_warnings(hp_torch_pch)

# hp_use_torch_pch(target): `target` sees torch/torch.h precompiled.
function(hp_use_torch_pch target)
  hp_warnings(${target})
  target_link_libraries(${target} PRIVATE hyper_parallel)
  target_precompile_headers(${target} REUSE_FROM hp_torch_pch)
endfunction()
