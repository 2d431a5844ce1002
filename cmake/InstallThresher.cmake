# The installed tree: library, headers and a CMake package whose paths are relative, so that it works
# from a prefix and from inside the Python wheel alike.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Thresher)

install(TARGETS thresher EXPORT ThresherTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_SKIP)
if(SKBUILD)
  # Wheels cannot hold symbolic links: one file under its soname is enough.
  set_target_properties(thresher PROPERTIES VERSION 0 SOVERSION 0)
else()
  install(TARGETS thresher LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_ONLY)
endif()
if(THRESHER_PYTHON)
  install(TARGETS thresher_tvm_ffi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(DIRECTORY include/thresher DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT ThresherTargets NAMESPACE thresher:: DESTINATION ${package_dir})
configure_package_config_file(cmake/ThresherConfig.cmake.in ThresherConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(ThresherConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/ThresherConfig.cmake
              ${PROJECT_BINARY_DIR}/ThresherConfigVersion.cmake DESTINATION ${package_dir})
