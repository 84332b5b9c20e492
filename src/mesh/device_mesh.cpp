#include <hyper_parallel/mesh/device_mesh.h>

#include <algorithm>
#include <set>

#include "mesh/mesh_impl.h"

namespace hyper_parallel {
namespace {

using Impl = DeviceMesh::Impl;

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string out;
  for (const auto& part : parts) {
    if (!out.empty()) out += separator;
    out += part;
  }
  return out;
}

std::string describe(const Impl& mesh) {
  std::string out = "DeviceMesh(" + mesh.root->device_type;
  for (std::size_t i = 0; i < mesh.names.size(); ++i) out += concat(", ", mesh.names[i], '=', mesh.shape[i]);
  return out + ")";
}

const Impl& require(const std::shared_ptr<const Impl>& impl, std::string_view op) {
  check_value(impl != nullptr, op, "empty mesh handle, want a mesh from init_device_mesh");
  return *impl;
}

// The axes of `root` in `axes`, with names, ranks and coordinate worked out.
std::shared_ptr<const Impl> make_view(std::shared_ptr<const MeshRoot> root, std::vector<std::vector<std::int64_t>> axes,
                                      std::vector<std::string> names) {
  auto view = std::make_shared<Impl>();
  std::int64_t base = 0;
  if (root->coordinate) {
    std::set<std::int64_t> free;
    for (const auto& axis : axes) free.insert(axis.begin(), axis.end());
    for (std::size_t a = 0; a < root->shape.size(); ++a) {
      const auto axis = static_cast<std::int64_t>(a);
      if (!free.contains(axis)) base += (*root->coordinate)[a] * root->stride(axis);
    }
    view->coordinate.emplace();
  }
  std::vector<std::int64_t> offsets{base};
  for (const auto& axis : axes) {
    std::int64_t size = 1;
    std::int64_t position = 0;
    for (const auto part : axis) {
      const auto extent = root->shape[static_cast<std::size_t>(part)];
      size *= extent;
      if (root->coordinate) position = position * extent + (*root->coordinate)[static_cast<std::size_t>(part)];
      std::vector<std::int64_t> longer;
      longer.reserve(offsets.size() * static_cast<std::size_t>(extent));
      for (const auto offset : offsets) {
        for (std::int64_t i = 0; i < extent; ++i) longer.push_back(offset + i * root->stride(part));
      }
      offsets = std::move(longer);
    }
    view->shape.push_back(size);
    if (view->coordinate) view->coordinate->push_back(position);
  }
  view->ranks.reserve(offsets.size());
  for (const auto offset : offsets) view->ranks.push_back(root->ranks[static_cast<std::size_t>(offset)]);
  view->root = std::move(root);
  view->axes = std::move(axes);
  view->names = std::move(names);
  return view;
}

std::int64_t axis_of(std::string_view op, const Impl& mesh, std::string_view name) {
  const auto found = std::find(mesh.names.begin(), mesh.names.end(), name);
  check_value(found != mesh.names.end(), op, "axis \"", name, "\" is unknown, want one of {", join(mesh.names, ", "), "} (",
              describe(mesh), ')');
  return found - mesh.names.begin();
}

bool same_root(const MeshRoot& a, const MeshRoot& b) {
  return a.device_type == b.device_type && a.shape == b.shape && a.names == b.names && a.ranks == b.ranks && a.rank == b.rank;
}

}  // namespace

std::int64_t MeshRoot::stride(std::int64_t axis) const {
  std::int64_t out = 1;
  for (std::size_t a = static_cast<std::size_t>(axis) + 1; a < shape.size(); ++a) out *= shape[a];
  return out;
}

DeviceMesh make_root_mesh(std::string_view op, MeshRoot root) {
  check_value(root.device_type == "cpu" || root.device_type == "cuda", op, "device type \"", root.device_type,
              "\", want \"cpu\" or \"cuda\"");
  check_value(!root.shape.empty(), op, "mesh has 0 dims, want 1 or more");
  std::int64_t size = 1;
  for (const auto extent : root.shape) {
    check_value(extent >= 1, op, "mesh has an axis of size ", extent, ", want 1 or more");
    size *= extent;
  }
  check_value(root.names.size() == root.shape.size(), op, root.names.size(), " axis names for ", root.shape.size(),
              " dims, want one each");
  std::set<std::string_view> seen;
  for (const auto& name : root.names) {
    check_value(!name.empty(), op, "empty axis name");
    check_value(seen.insert(name).second, op, "axis name \"", name, "\" is used twice");
  }
  check_value(static_cast<std::int64_t>(root.ranks.size()) == size, op, root.ranks.size(), " ranks for a mesh of ", size);
  check_value(std::set<int>(root.ranks.begin(), root.ranks.end()).size() == root.ranks.size(), op, "a rank is listed twice");
  const auto mine = std::find(root.ranks.begin(), root.ranks.end(), root.rank);
  if (mine != root.ranks.end()) {
    auto rest = static_cast<std::int64_t>(mine - root.ranks.begin());
    root.coordinate.emplace();
    for (std::size_t a = 0; a < root.shape.size(); ++a) {
      const auto stride = root.stride(static_cast<std::int64_t>(a));
      root.coordinate->push_back(rest / stride);
      rest %= stride;
    }
  }
  std::vector<std::vector<std::int64_t>> axes;
  for (std::size_t a = 0; a < root.shape.size(); ++a) axes.push_back({static_cast<std::int64_t>(a)});
  auto names = root.names;
  return DeviceMesh(make_view(std::make_shared<const MeshRoot>(std::move(root)), std::move(axes), std::move(names)));
}

std::vector<int> line_ranks(std::string_view op, const Impl& mesh, std::int64_t axis) {
  check_value(mesh.coordinate.has_value(), op, "rank ", mesh.root->rank, " is not part of ", describe(mesh));
  const auto a = static_cast<std::size_t>(normalize_axis(op, mesh, axis));
  std::int64_t stride = 1;
  std::int64_t base = 0;
  for (std::size_t i = mesh.shape.size(), step = 1; i-- > 0; step *= static_cast<std::size_t>(mesh.shape[i])) {
    if (i == a) {
      stride = static_cast<std::int64_t>(step);
    } else {
      base += (*mesh.coordinate)[i] * static_cast<std::int64_t>(step);
    }
  }
  std::vector<int> out;
  for (std::int64_t i = 0; i < mesh.shape[a]; ++i) out.push_back(mesh.ranks[static_cast<std::size_t>(base + i * stride)]);
  return out;
}

std::int64_t normalize_axis(std::string_view op, const Impl& mesh, std::int64_t axis) {
  const auto dims = static_cast<std::int64_t>(mesh.shape.size());
  check_value(axis >= -dims && axis < dims, op, "axis ", axis, " is out of range, want ", -dims, " to ", dims - 1, " (",
              describe(mesh), ')');
  return axis < 0 ? axis + dims : axis;
}

const std::string& DeviceMesh::device_type() const { return require(impl_, "DeviceMesh::device_type").root->device_type; }
std::int64_t DeviceMesh::ndim() const { return static_cast<std::int64_t>(require(impl_, "DeviceMesh::ndim").shape.size()); }
const std::vector<std::int64_t>& DeviceMesh::shape() const { return require(impl_, "DeviceMesh::shape").shape; }
const std::vector<std::string>& DeviceMesh::mesh_dim_names() const { return require(impl_, "DeviceMesh::mesh_dim_names").names; }
const std::vector<int>& DeviceMesh::ranks() const { return require(impl_, "DeviceMesh::ranks").ranks; }
std::int64_t DeviceMesh::size() const { return static_cast<std::int64_t>(require(impl_, "DeviceMesh::size").ranks.size()); }

std::int64_t DeviceMesh::size(std::int64_t axis) const {
  const auto& mesh = require(impl_, "DeviceMesh::size");
  return mesh.shape[static_cast<std::size_t>(normalize_axis("DeviceMesh::size", mesh, axis))];
}

std::int64_t DeviceMesh::axis(std::string_view name) const {
  return axis_of("DeviceMesh::axis", require(impl_, "DeviceMesh::axis"), name);
}

std::optional<std::vector<std::int64_t>> DeviceMesh::get_coordinate() const {
  return require(impl_, "DeviceMesh::get_coordinate").coordinate;
}

int DeviceMesh::get_local_rank(std::int64_t axis) const {
  constexpr std::string_view kOp = "DeviceMesh::get_local_rank";
  const auto& mesh = require(impl_, kOp);
  check_value(mesh.coordinate.has_value(), kOp, "rank ", mesh.root->rank, " is not part of ", describe(mesh));
  return static_cast<int>((*mesh.coordinate)[static_cast<std::size_t>(normalize_axis(kOp, mesh, axis))]);
}

int DeviceMesh::get_local_rank(std::string_view axis) const { return get_local_rank(this->axis(axis)); }

DeviceMesh DeviceMesh::operator[](std::string_view name) const { return (*this)[std::vector<std::string>{std::string(name)}]; }

DeviceMesh DeviceMesh::operator[](const std::vector<std::string>& names) const {
  constexpr std::string_view kOp = "DeviceMesh::operator[]";
  const auto& mesh = require(impl_, kOp);
  check_value(!names.empty(), kOp, "no axis name given, want one or more of {", join(mesh.names, ", "), '}');
  std::vector<std::vector<std::int64_t>> axes;
  std::int64_t last = -1;
  for (const auto& name : names) {
    const auto position = axis_of(kOp, mesh, name);
    check_value(position != last, kOp, "axis \"", name, "\" is named twice");
    check_value(position > last, kOp, "axes {", join(names, ", "), "} are not in mesh order or repeat, want the order of {",
                join(mesh.names, ", "), '}');
    last = position;
    axes.push_back(mesh.axes[static_cast<std::size_t>(position)]);
  }
  if (names.size() == mesh.names.size()) return *this;
  return DeviceMesh(make_view(mesh.root, std::move(axes), names));
}

DeviceMesh DeviceMesh::flatten(std::string_view name) const {
  constexpr std::string_view kOp = "DeviceMesh::flatten";
  const auto& mesh = require(impl_, kOp);
  std::string flat = name.empty() ? join(mesh.names, "_") : std::string(name);
  if (mesh.names.size() == 1 && mesh.names.front() == flat) return *this;
  const bool taken = std::find(mesh.root->names.begin(), mesh.root->names.end(), flat) != mesh.root->names.end();
  check_value(!taken, kOp, "name \"", flat, "\" already names an axis of the root mesh, want another (", describe(mesh), ')');
  std::vector<std::int64_t> all;
  for (const auto& axis : mesh.axes) all.insert(all.end(), axis.begin(), axis.end());
  return DeviceMesh(make_view(mesh.root, {std::move(all)}, {std::move(flat)}));
}

DeviceMesh DeviceMesh::concatenate(const std::vector<DeviceMesh>& meshes) {
  constexpr std::string_view kOp = "DeviceMesh::concatenate";
  check_value(!meshes.empty(), kOp, "no mesh given, want one or more");
  const auto& first = require(meshes.front().impl_, kOp);
  std::vector<std::vector<std::int64_t>> axes;
  std::vector<std::string> names;
  std::int64_t last = -1;
  std::set<std::int64_t> used;
  for (const auto& item : meshes) {
    const auto& mesh = require(item.impl_, kOp);
    check_value(same_root(*first.root, *mesh.root), kOp, describe(mesh), " and ", describe(first),
                " come from different root meshes");
    for (std::size_t a = 0; a < mesh.axes.size(); ++a) {
      const auto& name = mesh.names[a];
      check_value(std::find(names.begin(), names.end(), name) == names.end(), kOp, "axis name \"", name, "\" is used twice");
      for (const auto part : mesh.axes[a]) {
        check_value(used.insert(part).second, kOp, "axis \"", name, "\" overlaps with another one on root axis \"",
                    mesh.root->names[static_cast<std::size_t>(part)], '"');
        check_value(part > last, kOp, "axis \"", name, "\" is out of order, want the order of the root mesh {",
                    join(mesh.root->names, ", "), '}');
        last = part;
      }
      axes.push_back(mesh.axes[a]);
      names.push_back(name);
    }
  }
  return DeviceMesh(make_view(first.root, std::move(axes), std::move(names)));
}

const World& DeviceMesh::world() const { return *require(impl_, "DeviceMesh::world").root->world; }

std::string DeviceMesh::to_string() const { return impl_ == nullptr ? "DeviceMesh()" : describe(*impl_); }

bool operator==(const DeviceMesh& a, const DeviceMesh& b) {
  if (a.impl_ == b.impl_) return true;
  if (a.impl_ == nullptr || b.impl_ == nullptr) return false;
  return a.impl_->root->device_type == b.impl_->root->device_type && a.impl_->shape == b.impl_->shape &&
         a.impl_->names == b.impl_->names && a.impl_->ranks == b.impl_->ranks;
}

}  // namespace hyper_parallel
