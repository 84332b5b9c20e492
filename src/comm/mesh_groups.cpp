// The parts of DeviceMesh that need worlds and groups.
#include <algorithm>
#include <numeric>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/mesh/device_mesh.h>

#include "comm/comm_impl.h"
#include "comm/world_impl.h"
#include "mesh/mesh_impl.h"

namespace hyper_parallel {

DeviceMesh init_device_mesh(std::string_view device_type, const std::vector<std::int64_t>& shape,
                            const std::vector<std::string>& names) {
  constexpr std::string_view kOp = "init_device_mesh";
  const World world = current_world();
  MeshRoot root;
  root.device_type = device_type;
  root.shape = shape;
  root.names = names;
  if (names.empty() && shape.size() == 1) root.names = {"dp"};
  std::int64_t product = 1;
  for (const auto extent : shape) product *= std::max<std::int64_t>(extent, 0);
  check_value(shape.empty() || product == world.size(), kOp, "mesh has ", product, " ranks, want the world size ", world.size(),
              " (rank ", world.rank(), '/', world.size(), ')');
  root.ranks.resize(static_cast<std::size_t>(world.size()));
  std::iota(root.ranks.begin(), root.ranks.end(), 0);
  root.rank = world.rank();
  root.world = std::make_shared<const World>(world);
  return make_root_mesh(kOp, std::move(root));
}

DeviceMesh DeviceMesh::from_group(const std::vector<Comm>& groups, std::string_view device_type,
                                  const std::vector<std::int64_t>& shape, const std::vector<int>& ranks,
                                  const std::vector<std::string>& names) {
  constexpr std::string_view kOp = "DeviceMesh::from_group";
  check_value(!groups.empty() && groups.size() == shape.size(), kOp, groups.size(), " groups for ", shape.size(),
              " dims, want one each");
  check_value(!ranks.empty(), kOp, "no ranks given, want one for each position of the mesh");
  MeshRoot root;
  root.device_type = device_type;
  root.shape = shape;
  root.names = names;
  root.ranks = ranks;
  for (const auto& group : groups) {
    check_value(group.defined(), kOp, "empty Comm handle for one of the axes");
    root.groups.push_back(std::static_pointer_cast<void>(group.shared_impl()));
  }
  const auto& first = groups.front();
  root.rank = first.ranks()[static_cast<std::size_t>(first.rank())];
  auto world = first.impl().world.lock();
  if (world == nullptr) {
    // Groups without a world (dry runs, or a world that is gone): one that knows rank and size but has no store.
    world = std::make_shared<World::Impl>();
    world->rank = root.rank;
    world->size = std::max(*std::max_element(ranks.begin(), ranks.end()), root.rank) + 1;
    world->timeout = first.impl().timeout;
    world->allocator = first.impl().allocator;
    world->arena = std::static_pointer_cast<Arena>(first.impl().allocator_owner);
    world->fake = first.impl().fake;
  }
  root.world = std::make_shared<const World>(World(std::move(world)));
  auto mesh = make_root_mesh(kOp, std::move(root));
  for (std::size_t a = 0; a < groups.size(); ++a) {
    const auto line = line_ranks(kOp, mesh.impl(), static_cast<std::int64_t>(a));
    const bool fits = line == groups[a].ranks() || (groups[a].impl().fake && line.size() == groups[a].ranks().size());
    check_value(fits, kOp, "group ", groups[a].name(), " of ", groups[a].size(), " ranks does not hold the ranks along axis \"",
                names[a], "\" (", mesh.to_string(), ')');
  }
  return mesh;
}

DeviceMesh DeviceMesh::from_ranks(const World& world, std::string_view device_type, const std::vector<std::int64_t>& shape,
                                  const std::vector<int>& ranks, const std::vector<std::string>& names) {
  constexpr std::string_view kOp = "DeviceMesh::from_ranks";
  check_value(world.defined(), kOp, "empty World handle, want one from make_world or init_process_group");
  for (const int rank : ranks)
    check_value(rank >= 0 && rank < world.size(), kOp, "rank ", rank, ", want 0 to ", world.size() - 1);
  MeshRoot root;
  root.device_type = device_type;
  root.shape = shape;
  root.names = names;
  root.ranks = ranks;
  root.rank = world.rank();
  root.world = std::make_shared<const World>(world);
  return make_root_mesh(kOp, std::move(root));
}

Comm DeviceMesh::get_group(std::int64_t axis) const {
  constexpr std::string_view kOp = "DeviceMesh::get_group";
  check_value(impl_ != nullptr, kOp, "empty mesh handle, want a mesh from init_device_mesh");
  const auto a = static_cast<std::size_t>(normalize_axis(kOp, *impl_, axis));
  const auto& root = *impl_->root;
  if (!root.groups.empty() && impl_->axes[a].size() == 1) {
    return Comm(std::static_pointer_cast<Comm::Impl>(root.groups[static_cast<std::size_t>(impl_->axes[a].front())]));
  }
  const auto ranks = line_ranks(kOp, *impl_, axis);
  return Comm(find_or_make_group(root.world->shared_impl(), root.device_type, ranks, impl_->names[a]));
}

Comm DeviceMesh::get_group(std::string_view axis) const { return get_group(this->axis(axis)); }

}  // namespace hyper_parallel
