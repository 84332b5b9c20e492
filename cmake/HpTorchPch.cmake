# torch/torch.h precompiled: parsing it anew costs 10 s in every source. Tests have one of their own: compiled with -O1 they build in
# half the time, and what they time is in the library.
function(hp_add_torch_pch name)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/${name}.cpp CONTENT "" @ONLY)
  add_library(${name} OBJECT ${PROJECT_BINARY_DIR}/${name}.cpp)
  target_link_libraries(${name} PUBLIC hyper_parallel)
  target_precompile_headers(${name} PRIVATE <torch/torch.h>)
  target_compile_options(${name} PRIVATE ${ARGN})
  hp_warnings(${name})
endfunction()
set(HP_TEST_OPTIONS $<$<CONFIG:Release>:-O1>)
hp_add_torch_pch(hp_torch_pch)
if(HP_BUILD_TESTS)
  hp_add_torch_pch(hp_test_pch ${HP_TEST_OPTIONS})
endif()

# hp_use_torch_pch(target [TEST]): `target` sees torch/torch.h precompiled and links the library. Its compile options must be those
# of hp_torch_pch, or with TEST those of hp_test_pch, which it gets.
function(hp_use_torch_pch target)
  hp_warnings(${target})
  target_link_libraries(${target} PRIVATE hyper_parallel)
  if("${ARGV1}" STREQUAL "TEST")
    target_compile_options(${target} PRIVATE ${HP_TEST_OPTIONS})
    target_precompile_headers(${target} REUSE_FROM hp_test_pch)
  else()
    target_precompile_headers(${target} REUSE_FROM hp_torch_pch)
  endif()
  # ccache reads the preprocessed source; without this g++ drops the reference to the precompiled header from it.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  endif()
endfunction()
