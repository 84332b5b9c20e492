// What HSDPModule does to values, dtypes and buffers, by way of the engine.
#include <hyper_parallel/fsdp/init.h>
#include <hyper_parallel/nn/fully_shard.h>

namespace hyper_parallel {

void HSDPModule::to_empty(at::Device device) const {
  check_device("to_empty", device);
  fsdp::to_empty(*this);
}

void HSDPModule::reset_parameters(std::uint64_t seed, const fsdp::InitParameter& init) const {
  check_defined("reset_parameters");
  fsdp::reset_parameters(*this, seed, init);
}

void HSDPModule::load_full(const fsdp::NamedTensors& values, bool strict) const {
  check_defined("load_full");
  fsdp::load_full(*this, values, strict);
}

void HSDPModule::load_from_rank0(const fsdp::NamedTensors& values, bool strict) const {
  check_defined("load_from_rank0");
  fsdp::load_from_rank0(*this, values, strict);
}

void HSDPModule::to(at::ScalarType dtype) const {
  check_defined("to");
  fsdp::convert(*this, dtype);
}

void HSDPModule::to(at::Device device) const { check_device("to", device); }

void HSDPModule::cast_buffers(at::ScalarType dtype) const {
  check_defined("cast_buffers");
  fsdp::cast_buffers(*this, dtype);
}

void HSDPModule::check_defined(std::string_view op) const {
  check_value(defined(), op, "handle is empty, want the one that fully_shard returned");
}

/// Shards live on the device of the mesh, whose collectives move them.
void HSDPModule::check_device(std::string_view op, at::Device device) const {
  check_defined(op);
  const std::string& want = fsdp::device_type(*this);
  check_value(device.type() == at::Device(want).type(), op, "device is ", device, ", want ", want,
              ", the device of the unit's mesh: wrap on a mesh of another device instead (unit ", name(), ')');
}

}  // namespace hyper_parallel
