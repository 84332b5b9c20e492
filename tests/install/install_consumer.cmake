# Installs BUILD into a fresh prefix, then configures, builds and runs the project in SOURCE against nothing but that prefix.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "failed (${status}): ${command}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
foreach(file include/hyper_parallel/hyper_parallel.h ${LIBDIR}/libhyper_parallel.so ${LIBDIR}/cmake/hyper_parallel/hyper_parallelConfig.cmake bin/hp-train)
  if(NOT EXISTS ${WORK}/prefix/${file})
    message(FATAL_ERROR "the installed copy has no ${file}")
  endif()
endforeach()

# Neither the source tree nor the build tree may be named in what was installed.
file(GLOB package_files ${WORK}/prefix/${LIBDIR}/cmake/hyper_parallel/hyper_parallelTargets*.cmake)
foreach(file ${package_files})
  file(READ ${file} text)
  string(FIND "${text}" "${BUILD}" found)
  if(NOT found EQUAL -1)
    message(FATAL_ERROR "${file} names the build tree")
  endif()
endforeach()

run(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G ${GENERATOR} -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${WORK}/prefix
  -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/consumer)
run(${WORK}/prefix/bin/hp-train --help)
