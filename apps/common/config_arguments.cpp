#include "common/config_arguments.h"

#include <CLI/CLI.hpp>

namespace hyper_parallel::apps {
namespace {

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

}  // namespace

struct ConfigArguments::Impl {
  CLI::App& app;
  std::string file = {};
  std::vector<train::FieldInfo> fields = train::describe({});
  std::vector<std::string> values = std::vector<std::string>(fields.size());
  std::vector<CLI::Option*> options = {};
  std::vector<train::Override> overrides = {};
};

ConfigArguments::ConfigArguments(CLI::App& app) : impl_(std::make_unique<Impl>(Impl{.app = app})) {
  app.add_option("config", impl_->file, "TOML file; every value of it can be overridden below");
  for (std::size_t i = 0; i < impl_->fields.size(); ++i) {
    const train::FieldInfo& field = impl_->fields[i];
    CLI::Option* option =
        app.add_option(concat("--", field.section, '.', field.key), impl_->values[i], concat(field.help, " [", field.value, ']'));
    option->group(concat('[', field.section, ']'))->type_name("VALUE")->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    impl_->options.push_back(option);
  }
  app.allow_extras();
}

ConfigArguments::~ConfigArguments() = default;

bool ConfigArguments::parse(int argc, const char* const* argv) {
  const std::string& name = impl_->app.get_name();
  try {
    impl_->app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return false;
  } catch (const CLI::Error& error) {
    throw ValueError(concat('[', name, "] ", error.what(), ", see ", name, " --help"));
  }
  for (std::size_t i = 0; i < impl_->fields.size(); ++i) {
    const train::FieldInfo& field = impl_->fields[i];
    if (impl_->options[i]->count() > 0) impl_->overrides.emplace_back(concat(field.section, '.', field.key), impl_->values[i]);
  }
  const std::vector<std::string> extras = impl_->app.remaining();
  if (extras.empty()) return true;
  const std::string key = extras[0].substr(0, extras[0].find('='));
  if (!key.starts_with("--") || key.find('.') == std::string::npos)
    throw ValueError(concat('[', name, "] unexpected argument ", joined(extras), ", see ", name, " --help"));
  impl_->overrides.emplace_back(key.substr(2), "");
  return true;
}

std::filesystem::path ConfigArguments::file() const { return impl_->file; }
const std::vector<train::Override>& ConfigArguments::overrides() const { return impl_->overrides; }

}  // namespace hyper_parallel::apps
