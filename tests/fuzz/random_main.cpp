// Runs a fuzz driver on random inputs where the compiler has no libFuzzer.
//   NAME [-max_total_time=SECONDS] [-runs=N] [-seed=N] [FILE ...]    (libFuzzer's names)
// With files, each is one input. A failing input is named by its seed: -seed=N -runs=1 repeats it.
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

unsigned long current_seed;

void name_input() {
  std::fprintf(stderr, "failing input: -seed=%lu -runs=1\n", current_seed);
}

std::vector<uint8_t> random_input(unsigned long seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<uint8_t> input(random() % 512);
  // Small values lead further into the drivers than large ones.
  const bool small = random() % 2 == 0;
  for (uint8_t& byte : input)
    byte = static_cast<uint8_t>(small ? random() % 16 : random());
  return input;
}

} // namespace

// The sanitizers call it when they report.
extern "C" void __sanitizer_set_death_callback(void (*)()) __attribute__((weak));

int main(int count, char** arguments) {
  unsigned long seed = 1, runs = ~0UL;
  double seconds = 0;
  std::vector<std::string> files;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals),
                      value = equals == std::string::npos ? "" : argument.substr(equals + 1);
    if (name == "-max_total_time")
      seconds = std::stod(value);
    else if (name == "-runs")
      runs = std::stoul(value);
    else if (name == "-seed")
      seed = std::stoul(value);
    else if (argument[0] != '-')
      files.push_back(argument);
  }
  for (const std::string& file : files) {
    std::ifstream stream(file, std::ios::binary);
    const std::vector<char> input{std::istreambuf_iterator<char>(stream), {}};
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  }
  if (!files.empty())
    return 0;
  if (__sanitizer_set_death_callback)
    __sanitizer_set_death_callback(name_input);
  std::signal(SIGABRT, [](int) { name_input(); });
  const auto start = std::chrono::steady_clock::now();
  auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  unsigned long done = 0;
  for (; done < runs && (seconds <= 0 || elapsed() < seconds); ++done) {
    current_seed = seed + done;
    const std::vector<uint8_t> input = random_input(current_seed);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("Done %lu runs in %.0f second(s)\n", done, elapsed());
}
