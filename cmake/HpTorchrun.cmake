# HP_TORCHRUN: the torchrun of the torch that we build against; tests with several processes start their ranks with it.
get_filename_component(hp_torch_bin "${HP_TORCH_FOLDER}/../../../../bin" ABSOLUTE)
find_program(HP_TORCHRUN torchrun HINTS ${PROJECT_SOURCE_DIR}/.venv/bin ${hp_torch_bin})
if(NOT HP_TORCHRUN)
  message(FATAL_ERROR "The tests need torchrun, which comes with torch's Python package: run tools/setup.sh, or give -DHP_TORCHRUN=<path>, or -DHP_BUILD_TESTS=OFF")
endif()
