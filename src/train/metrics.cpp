#include <hyper_parallel/train/metrics.h>

#include <unistd.h>

#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include "train/cannot_write.h"

namespace hyper_parallel::train {
namespace {

// JSON has no NaN and no infinity: null stands for them.
nlohmann::ordered_json number(double value) {
  if (!std::isfinite(value)) return nullptr;
  return value;
}

}  // namespace

MetricsFile::MetricsFile(const std::filesystem::path& file) : path_(file), out_(file, std::ios::trunc) {
  if (!out_) throw cannot_write(file);
}

MetricsFile::MetricsFile(const std::filesystem::path& file, std::int64_t last, RunHistory& history) {
  const auto real = [](const nlohmann::json& json, const char* key) {
    const auto found = json.find(key);
    return found != json.end() && found->is_number() ? found->get<double>() : std::numeric_limits<double>::quiet_NaN();
  };
  std::string kept;
  std::ifstream in(file);
  for (std::string text; std::getline(in, text);) {
    const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer()) continue;
    const auto step = json["step"].get<std::int64_t>();
    if (step > last) continue;
    kept += text + '\n';
    if (json.contains("val_loss")) {
      history.validations.emplace_back(step, real(json, "val_loss"));
      continue;
    }
    history.steps.push_back({.step = step,
                             .tokens = json.value("tokens", std::int64_t{0}),
                             .epoch = real(json, "epoch"),
                             .loss = real(json, "loss"),
                             .grad_norm = real(json, "grad_norm"),
                             .loss_scale = real(json, "loss_scale"),
                             .lr = real(json, "lr"),
                             .tokens_per_s = real(json, "tokens_per_s"),
                             .step_ms = real(json, "step_ms"),
                             .memory = json.value("memory", std::int64_t{0}),
                             .elapsed_s = real(json, "elapsed_s"),
                             .eta_s = real(json, "eta_s")});
    if (json.contains("aux_loss")) history.steps.back().aux_loss = real(json, "aux_loss");
  }
  in.close();
  *this = MetricsFile(file);
  out_ << kept << std::flush;
  if (!out_) throw cannot_write(file);
}

void MetricsFile::line(const std::string& text) {
  if (path_.empty()) return;
  out_ << text << '\n' << std::flush;
  if (!out_) throw cannot_write(path_);
}

void MetricsFile::write(const StepMetrics& m) {
  nlohmann::ordered_json json;
  json["step"] = m.step;
  json["tokens"] = m.tokens;
  json["epoch"] = number(m.epoch);
  json["loss"] = number(m.loss);
  if (m.aux_loss) json["aux_loss"] = number(*m.aux_loss);
  json["grad_norm"] = number(m.grad_norm);
  json["loss_scale"] = number(m.loss_scale);
  json["lr"] = number(m.lr);
  json["tokens_per_s"] = number(m.tokens_per_s);
  json["step_ms"] = number(m.step_ms);
  json["memory"] = m.memory;
  json["elapsed_s"] = number(m.elapsed_s);
  json["eta_s"] = number(m.eta_s);
  line(json.dump());
}

void MetricsFile::write_validation(std::int64_t step, double loss, double seconds) {
  nlohmann::ordered_json json;
  json["step"] = step;
  json["val_loss"] = number(loss);
  json["val_s"] = number(seconds);
  line(json.dump());
}

std::int64_t resident_bytes() {
  std::ifstream in("/proc/self/statm");
  std::int64_t total = 0, resident = 0;
  if (!(in >> total >> resident)) return 0;
  return resident * ::sysconf(_SC_PAGESIZE);
}

}  // namespace hyper_parallel::train
