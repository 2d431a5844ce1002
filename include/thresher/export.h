/// \file
/// Marks what leaves the shared library; everything else is hidden.
#pragma once

/// Visible in libthresher.so. The library is built with hidden visibility.
#if defined(_WIN32)
#define THRESHER_API
#else
#define THRESHER_API __attribute__((visibility("default")))
#endif
