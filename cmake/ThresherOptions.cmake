# Compile options of every C++ target of the project, as one interface target.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
# Only what carries THRESHER_API leaves the library.
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

add_library(thresher_options INTERFACE)
target_compile_features(thresher_options INTERFACE cxx_std_20)
target_compile_options(thresher_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${THRESHER_WERROR}>>:-Werror>)
if(THRESHER_SANITIZE)
  target_compile_options(thresher_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${THRESHER_SANITIZE} -fno-omit-frame-pointer -g>)
  target_link_options(thresher_options INTERFACE -fsanitize=${THRESHER_SANITIZE})
endif()
