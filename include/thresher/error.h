// Errors thrown by the library. Every public function checks its arguments before it computes or
// writes anything, so a thrown Error means: nothing has happened.
#pragma once

#include <stdexcept>
#include <string>

namespace thresher {

enum class ErrorCode {
  kInvalidValue,  // a shape, stride, count or index that the operation does not accept
  kInvalidType,   // a dtype or device that the operation does not accept
  kNotSupported,  // a legal problem that the chosen backend does not cover
  kOutOfMemory,   // a workspace or allocation that is too small or could not be had
  kDeviceFailure, // the device reported an error
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, std::string argument, const std::string& message)
      : std::runtime_error(argument.empty() ? message : argument + ": " + message), code_(code),
        argument_(std::move(argument)) {}

  ErrorCode code() const noexcept { return code_; }
  // Name of the offending argument as it stands in the params struct ("q_proxy"); empty if none.
  const std::string& argument() const noexcept { return argument_; }

 private:
  ErrorCode code_;
  std::string argument_;
};

} // namespace thresher
