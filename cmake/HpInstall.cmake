# `cmake --install`: the library, its headers, the programs and a package, so that a project writes
#   find_package(hyper_parallel REQUIRED)
#   target_link_libraries(app PRIVATE hyper_parallel::hyper_parallel)
include(CMakePackageConfigHelpers)

set(hp_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/hyper_parallel)

install(TARGETS hyper_parallel EXPORT hyper_parallelTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT hyper_parallelTargets NAMESPACE hyper_parallel:: DESTINATION ${hp_package_dir})
foreach(program hp-train hp-ckpt hp-plan)
  if(TARGET ${program})
    install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endforeach()

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/hyper_parallelConfig.cmake.in
  ${PROJECT_BINARY_DIR}/hyper_parallelConfig.cmake INSTALL_DESTINATION ${hp_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/hyper_parallelConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/hyper_parallelConfig.cmake ${PROJECT_BINARY_DIR}/hyper_parallelConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/HpTorch.cmake DESTINATION ${hp_package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
