#pragma once
// HP_API marks what the shared library exports; everything else stays hidden.
#if defined(_WIN32)
#define HP_API
#else
#define HP_API __attribute__((visibility("default")))
#endif
