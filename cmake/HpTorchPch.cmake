# One precompiled torch/torch.h for examples, apps, tests and benchmarks: parsing it anew costs 10 s in every source.
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/hp_torch_pch.cpp CONTENT "" @ONLY)
add_library(hp_torch_pch OBJECT ${PROJECT_BINARY_DIR}/hp_torch_pch.cpp)
target_link_libraries(hp_torch_pch PUBLIC hyper_parallel)
target_precompile_headers(hp_torch_pch PRIVATE <torch/torch.h>)
hp_warnings(hp_torch_pch)

# hp_use_torch_pch(target): `target` sees torch/torch.h precompiled and links the library. Its compile options must be those of hp_torch_pch.
function(hp_use_torch_pch target)
  hp_warnings(${target})
  target_link_libraries(${target} PRIVATE hyper_parallel)
  target_precompile_headers(${target} REUSE_FROM hp_torch_pch)
  # ccache reads the preprocessed source; without this g++ drops the reference to the precompiled header from it.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  endif()
endfunction()
