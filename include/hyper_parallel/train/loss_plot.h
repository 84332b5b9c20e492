#pragma once
// A loss curve as SVG. Torch-free.
#include <string>
#include <vector>

namespace hyper_parallel::train {

struct PlotPoint {
  double x = 0;
  double y = 0;
};

/// Curves of one run over the optimizer step.
struct LossPlot {
  std::string title = {};
  std::vector<PlotPoint> train = {};       ///< one per step: drawn faintly, with a running mean over it
  std::vector<PlotPoint> validation = {};  ///< drawn as a line with dots
};

/// A self-contained SVG document of 860 x 480. Points that are not finite are left out.
[[nodiscard]] std::string to_svg(const LossPlot& plot);

}  // namespace hyper_parallel::train
