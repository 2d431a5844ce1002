# Target thresher_eigen: Eigen >= 3.4 from the system, otherwise the pinned release.
find_package(Eigen3 3.4 QUIET NO_MODULE)
add_library(thresher_eigen INTERFACE)
if(TARGET Eigen3::Eigen)
  target_link_libraries(thresher_eigen INTERFACE Eigen3::Eigen)
else()
  include(FetchContent)
  FetchContent_Declare(eigen
    URL https://gitlab.com/libeigen/eigen/-/archive/3.4.0/eigen-3.4.0.tar.gz
    URL_HASH SHA256=8586084f71f9bde545ee7fa6d00288b264a2b7ac3607b974e54d13e7162c1c72
    DOWNLOAD_EXTRACT_TIMESTAMP ON
    SOURCE_SUBDIR none)  # headers only: Eigen's own build is not wanted
  FetchContent_MakeAvailable(eigen)
  target_include_directories(thresher_eigen SYSTEM INTERFACE ${eigen_SOURCE_DIR})
endif()
