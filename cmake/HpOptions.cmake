# Options of the build, and the compile options of the library and of everything built with it.

set(HP_SANITIZE "" CACHE STRING "Sanitizers for everything built here, e.g. address,undefined or thread")
option(HP_WERROR "Treat warnings as errors" ${PROJECT_IS_TOP_LEVEL})

# Torch comes in as SYSTEM, so these meet only our own code.
function(hp_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor $<$<BOOL:${HP_WERROR}>:-Werror>)
  if(HP_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${HP_SANITIZE} -fno-omit-frame-pointer)
    target_link_options(${target} PRIVATE -fsanitize=${HP_SANITIZE})
    # torch's headers have a fence, which this sanitizer does not see.
    if(HP_SANITIZE MATCHES "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      target_compile_options(${target} PRIVATE -Wno-tsan)
    endif()
  endif()
endfunction()

function(hp_configure_library target)
  hp_warnings(${target})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${target} PUBLIC torch)
endfunction()
