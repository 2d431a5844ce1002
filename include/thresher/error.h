/// \file
/// Errors thrown by the library. Every public function checks its arguments before it computes or
/// writes anything, so a thrown Error means: nothing has happened.
#pragma once

#include <thresher/export.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace thresher {

/// What kind of thing went wrong.
enum class ErrorCode {
  kInvalidValue,  ///< A shape, stride, count or index that the operation does not accept.
  kInvalidType,   ///< A dtype or device that the operation does not accept.
  kNotSupported,  ///< A legal problem that the chosen backend does not cover.
  kOutOfMemory,   ///< A workspace or allocation that is too small or could not be had.
  kDeviceFailure, ///< The device reported an error.
};

/// The only exception of this library. what() begins with the argument and says its value and what
/// is supported. Visible, so that it can be caught across the library's border.
class THRESHER_API Error : public std::runtime_error {
 public:
  /// \param code what kind of error
  /// \param argument name of the argument in the params struct, or empty
  /// \param message its value and what is supported
  Error(ErrorCode code, std::string argument, const std::string& message)
      : std::runtime_error(argument.empty() ? message : argument + ": " + message), code_(code),
        argument_(std::move(argument)) {}

  /// \return what kind of error it is
  ErrorCode code() const noexcept { return code_; }
  /// \return name of the offending argument as it stands in the params struct ("q_proxy"); empty if
  /// there is none
  const std::string& argument() const noexcept { return argument_; }

 private:
  ErrorCode code_;
  std::string argument_;
};

} // namespace thresher
