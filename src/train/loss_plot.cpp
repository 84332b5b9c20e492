#include <hyper_parallel/train/loss_plot.h>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace hyper_parallel::train {
namespace {

constexpr double kWidth = 860, kHeight = 480, kLeft = 64, kRight = 24, kTop = 48, kBottom = 52;

struct Axis {
  double low = 0, high = 1;  // data
  double from = 0, to = 1;   // picture
  [[nodiscard]] double operator()(double v) const { return from + (v - low) / (high - low) * (to - from); }
};

std::vector<PlotPoint> finite(const std::vector<PlotPoint>& points) {
  std::vector<PlotPoint> kept;
  for (const PlotPoint& p : points)
    if (std::isfinite(p.x) && std::isfinite(p.y)) kept.push_back(p);
  return kept;
}

// 1, 2 or 5 times a power of ten, so that about `count` steps cover `span`.
double nice_step(double span, int count) {
  const double raw = span / count, power = std::pow(10.0, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (raw <= factor * power) return factor * power;
  return 10 * power;
}

Axis make_axis(double low, double high, double from, double to) {
  if (!(high > low)) {
    low -= 0.5;
    high += 0.5;
  }
  return {low, high, from, to};
}

// A trailing mean over about 2 % of the points.
std::vector<PlotPoint> smooth(const std::vector<PlotPoint>& points) {
  const std::size_t window = std::max<std::size_t>(1, points.size() / 50);
  std::vector<PlotPoint> out;
  double sum = 0;
  for (std::size_t i = 0; i < points.size(); ++i) {
    sum += points[i].y;
    if (i >= window) sum -= points[i - window].y;
    out.push_back({points[i].x, sum / static_cast<double>(std::min(i + 1, window))});
  }
  return out;
}

std::string polyline(const std::vector<PlotPoint>& points, const Axis& x, const Axis& y, std::string_view style) {
  if (points.empty()) return "";
  // More points than pixels only make the file large.
  const std::size_t stride = std::max<std::size_t>(1, points.size() / 1600);
  std::string path;
  for (std::size_t i = 0; i < points.size(); i += stride)
    path += fmt::format("{}{:.1f},{:.1f}", path.empty() ? "" : " ", x(points[i].x), y(points[i].y));
  return fmt::format("<polyline fill=\"none\" {} points=\"{}\"/>\n", style, path);
}

std::string escape(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '&')
      out += "&amp;";
    else if (c == '"')
      out += "&quot;";
    else if (static_cast<unsigned char>(c) >= 0x20)
      out += c;
  }
  return out;
}

std::string grid(const Axis& x, const Axis& y) {
  std::string out;
  const double dy = nice_step(y.high - y.low, 8), dx = nice_step(x.high - x.low, 8);
  for (double v = std::ceil(y.low / dy) * dy; v <= y.high + 1e-9 * dy; v += dy)
    out += fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#dddddd\"/>\n"
        "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{:.3g}</text>\n",
        x.from, y(v), x.to, y(v), x.from - 8, y(v) + 4, std::abs(v) < 1e-9 * dy ? 0.0 : v);
  for (double v = std::ceil(x.low / dx) * dx; v <= x.high + 1e-9 * dx; v += dx)
    out += fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#eeeeee\"/>\n"
        "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{:.6g}</text>\n",
        x(v), y.from, x(v), y.to, x(v), y.from + 20, std::abs(v) < 1e-9 * dx ? 0.0 : v);
  return out;
}

std::string legend(bool train, bool validation) {
  std::string out;
  double at = kWidth - kRight - 150;
  auto entry = [&](const char* colour, const char* name, double top) {
    out += fmt::format(
        "<line x1=\"{0:.1f}\" y1=\"{1:.1f}\" x2=\"{2:.1f}\" y2=\"{1:.1f}\" stroke=\"{3}\" stroke-width=\"3\"/>\n"
        "<text x=\"{4:.1f}\" y=\"{5:.1f}\">{6}</text>\n",
        at, top, at + 24, colour, at + 32, top + 4, name);
  };
  if (train) entry("#1f77b4", "training", kTop + 14);
  if (validation) entry("#d62728", "validation", kTop + 34);
  return out;
}

}  // namespace

std::string to_svg(const LossPlot& plot) {
  const std::vector<PlotPoint> train = finite(plot.train), validation = finite(plot.validation);
  double low_x = 0, high_x = 1, low_y = 0, high_y = 1;
  bool first = true;
  for (const auto* points : {&train, &validation})
    for (const PlotPoint& p : *points) {
      low_x = first ? p.x : std::min(low_x, p.x);
      high_x = first ? p.x : std::max(high_x, p.x);
      low_y = first ? p.y : std::min(low_y, p.y);
      high_y = first ? p.y : std::max(high_y, p.y);
      first = false;
    }
  const double margin = 0.05 * (high_y - low_y);
  const Axis x = make_axis(low_x, high_x, kLeft, kWidth - kRight);
  const Axis y = make_axis(low_y - margin, high_y + margin, kHeight - kBottom, kTop);

  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
      "font-family=\"sans-serif\" font-size=\"12\" fill=\"#333333\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"#ffffff\"/>\n"
      "<text x=\"{2}\" y=\"28\" font-size=\"16\">{3}</text>\n",
      kWidth, kHeight, kLeft, escape(plot.title));
  svg += grid(x, y);
  svg += polyline(train, x, y, "stroke=\"#1f77b4\" stroke-opacity=\"0.25\"");
  svg += polyline(smooth(train), x, y, "stroke=\"#1f77b4\" stroke-width=\"2\"");
  svg += polyline(validation, x, y, "stroke=\"#d62728\" stroke-width=\"2\"");
  for (const PlotPoint& p : validation)
    svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"#d62728\"/>\n", x(p.x), y(p.y));
  svg += legend(!train.empty(), !validation.empty());
  svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">step</text>\n", (x.from + x.to) / 2, kHeight - 12);
  svg += fmt::format("<text transform=\"translate(16,{:.1f}) rotate(-90)\" text-anchor=\"middle\">loss (nats per token)</text>\n",
                     (y.from + y.to) / 2);
  return svg + "</svg>\n";
}

}  // namespace hyper_parallel::train
