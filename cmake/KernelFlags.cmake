# How kernels are compiled: architectures, and a build that fails on register spills.

# thresher_gencode(OUT ARCHS...): nvcc options for machine code of these architectures, and with PTX
# as the first argument also the PTX of the highest one without a suffix, for GPUs to come.
function(thresher_gencode out)
  cmake_parse_arguments(PARSE_ARGV 1 arg "PTX" "" "")
  set(options)
  set(highest 0)
  foreach(arch IN LISTS arg_UNPARSED_ARGUMENTS)
    list(APPEND options "-gencode=arch=compute_${arch},code=sm_${arch}")
    if(arch MATCHES "^[0-9]+$" AND arch GREATER highest)
      set(highest ${arch})
    endif()
  endforeach()
  if(arg_PTX AND highest GREATER 0)
    list(APPEND options "-gencode=arch=compute_${highest},code=compute_${highest}")
  endif()
  set(${out} ${options} PARENT_SCOPE)
endfunction()

# thresher_kernels(TARGET GENCODE...): options of a target with CUDA sources.
function(thresher_kernels target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR}/src
                                              ${PROJECT_SOURCE_DIR}/include)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 ${ARGN} --expt-relaxed-constexpr -Xcompiler=-Wall>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${THRESHER_WERROR}>>:-Werror=all-warnings>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${THRESHER_CUDA_LINEINFO}>>:-lineinfo>)
  set_target_properties(${target} PROPERTIES
    CUDA_COMPILER_LAUNCHER ${PROJECT_SOURCE_DIR}/cmake/nvcc_checked.sh
    CUDA_VISIBILITY_PRESET hidden CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON CUDA_RESOLVE_DEVICE_SYMBOLS OFF)
endfunction()
