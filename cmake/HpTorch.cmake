# Finds torch and defines the target `torch`. Also part of the installed package.
#
# Looked for in this order: CMAKE_PREFIX_PATH and Torch_DIR, as in any CMake project; HP_TORCH (variable or environment: a python that
# has torch, a site-packages folder, or the torch folder of a wheel); HP_TORCH_HINTS (torch folders that the including file knows of).
# When pip builds our package, the python that installs it is asked in place of the hints.
# The config file of a CUDA build wants a CUDA toolkit of a fitting release and enables the CUDA language. Nothing here needs either, so
# the target is made from the libraries of such a build.
if(TARGET torch)
  return()
endif()

# Sets `out` to the torch folder that `where` names, or to "".
function(hp_torch_folder where out)
  set(${out} "" PARENT_SCOPE)
  if(IS_DIRECTORY "${where}")
    foreach(folder "${where}" "${where}/torch")
      if(EXISTS "${folder}/share/cmake/Torch/TorchConfig.cmake")
        set(${out} "${folder}" PARENT_SCOPE)
        return()
      endif()
    endforeach()
    set(where "${where}/bin/python")
  endif()
  if(EXISTS "${where}")
    # pip's isolated build runs the python that installs, with variables that hide its packages.
    foreach(hidden "" "--unset=PYTHONPATH;--unset=PYTHONNOUSERSITE")
      execute_process(
        COMMAND ${CMAKE_COMMAND} -E env ${hidden} "${where}" -c
          "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
        OUTPUT_VARIABLE folder ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status)
      if(status EQUAL 0)
        set(${out} "${folder}" PARENT_SCOPE)
        return()
      endif()
    endforeach()
  endif()
endfunction()

# The target `torch` from the libraries in `folder`.
function(hp_import_torch folder)
  set(libraries "")
  foreach(name torch torch_cpu torch_cuda c10 c10_cuda)
    if(EXISTS "${folder}/lib/lib${name}.so")
      list(APPEND libraries "${folder}/lib/lib${name}.so")
    endif()
  endforeach()
  add_library(torch INTERFACE IMPORTED)
  set_target_properties(torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${folder}/include;${folder}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO;USE_RPC;USE_TENSORPIPE"
    INTERFACE_LINK_LIBRARIES "-Wl,--no-as-needed;${libraries};-Wl,--as-needed")
endfunction()

find_path(HP_TORCH_CONFIG_DIR TorchConfig.cmake HINTS "${Torch_DIR}" PATH_SUFFIXES Torch share/cmake/Torch NO_CACHE)
set(hp_torch_by_pip OFF)
if(SKBUILD AND "${SKBUILD_PROJECT_NAME}" STREQUAL "hyper_parallel")
  set(hp_torch_by_pip ON)
  set(HP_TORCH_HINTS ${Python_EXECUTABLE})
endif()
set(HP_TORCH_FOLDER "")
if(HP_TORCH_CONFIG_DIR)
  get_filename_component(HP_TORCH_FOLDER "${HP_TORCH_CONFIG_DIR}/../../.." ABSOLUTE)
endif()
foreach(hp_where "${HP_TORCH}" "$ENV{HP_TORCH}" ${HP_TORCH_HINTS})
  if(NOT HP_TORCH_FOLDER AND hp_where)
    hp_torch_folder("${hp_where}" HP_TORCH_FOLDER)
  endif()
endforeach()
set(hp_torch_version "")
if(EXISTS "${HP_TORCH_FOLDER}/version.py")
  file(STRINGS "${HP_TORCH_FOLDER}/version.py" hp_torch_version REGEX "^__version__")
  string(REGEX REPLACE "^[^']*'([^']*)'.*$" "\\1" hp_torch_version "${hp_torch_version}")
endif()
if(hp_torch_by_pip AND NOT hp_torch_version MATCHES "^2\\.13\\.")
  if(HP_TORCH_FOLDER)
    set(hp_what "${hp_torch_version} in ${HP_TORCH_FOLDER}")
  else()
    set(hp_what "none")
  endif()
  message(FATAL_ERROR "hyper_parallel needs torch 2.13 where pip installs it, and ${Python_EXECUTABLE} has ${hp_what}. "
    "Install torch there first, or say where another one is:\n"
    "  HP_TORCH=<a python that has torch, or its site-packages/torch folder> pip install .")
elseif(NOT HP_TORCH_FOLDER)
  message(FATAL_ERROR
    "hyper_parallel needs torch 2.13 and found none. Run tools/setup.sh, which puts it into .venv of the repository, or say where it is:\n"
    "  cmake -DHP_TORCH=<a python that has torch, or its site-packages/torch folder> ...\n"
    "  cmake -DCMAKE_PREFIX_PATH=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)') ...")
endif()

set(hp_torch_cuda "")
if(EXISTS "${HP_TORCH_FOLDER}/version.py")  # a bare libtorch has none, and its config file decides
  file(STRINGS "${HP_TORCH_FOLDER}/version.py" hp_torch_cuda REGEX "^cuda.*= *'")
endif()
if(hp_torch_cuda)
  hp_import_torch("${HP_TORCH_FOLDER}")
else()
  # The wheel has no such static library, and its config file warns about that at every run; nothing reads the variable.
  set(kineto_LIBRARY "unused")
  find_package(Torch 2.13 REQUIRED PATHS "${HP_TORCH_FOLDER}/share/cmake/Torch" NO_DEFAULT_PATH)
  unset(kineto_LIBRARY)
  # Its link directories are guesses about MKL installations; they would end up in the run path of everything we link.
  if(TARGET caffe2::mkl)
    set_target_properties(caffe2::mkl PROPERTIES INTERFACE_LINK_DIRECTORIES "")
  endif()
endif()
