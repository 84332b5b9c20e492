# The public headers, installed with the library. The tests compare this list with the tree (tools/check_headers.py). Headers of `train`
# belong to hp-train and are not installed.
target_sources(hyper_parallel PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}/include FILES
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/ckpt/checkpoint.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/ckpt/safetensors.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/comm/comm.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/comm/world.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/core/error.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/core/export.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/core/log.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/core/trace.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/dtensor/box.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/dtensor/dtensor.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/dtensor/layout.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/dtensor/placement.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/fsdp/comm_hooks.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/fsdp/group_layout.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/fsdp/init.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/fsdp/policy.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/fsdp/unit.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/fsdp/zero.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/hyper_parallel.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/mesh/device_mesh.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/nn/checkpoint.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/nn/fully_shard.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/nn/init.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/nn/library.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/nn/module.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/nn/walk.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/optim/adamw.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/optim/clip_grad.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/optim/ema.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/optim/flat_optimizer.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/optim/grad_scaler.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/optim/lr_schedule.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/optim/muon.h
  ${PROJECT_SOURCE_DIR}/include/hyper_parallel/optim/sgd.h)
