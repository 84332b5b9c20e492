// hp-ckpt: reads the command line, runs the command, and turns every failure into one line and exit code 2.
#include <cstdio>
#include <exception>
#include <string>

#include "common/output.h"

#include "command_line.h"
#include "commands.h"

namespace {

namespace apps = hyper_parallel::apps;

int run(int argc, const char* const* argv) {
  const apps::CkptCommand command = apps::parse_ckpt_command(argc, argv);
  if (command.text) {
    std::fputs(command.text->c_str(), stdout);
    return 0;
  }
  if (command.name == "inspect") return apps::inspect(command);
  if (command.name == "verify") return apps::verify(command);
  if (command.name == "convert") return apps::convert(command);
  if (command.name == "diff") return apps::diff(command);
  return apps::reshard(command);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int code = run(argc, argv);
    apps::finish_output("hp-ckpt");
    return code;
  } catch (const std::exception& error) {
    std::fflush(stdout);
    std::fprintf(stderr, "hp-ckpt: error: %s\n", apps::first_line(error).c_str());
    return 2;
  }
}
