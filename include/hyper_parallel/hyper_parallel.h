#pragma once
// Everything that a training program needs.
#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/core/error.h>
#include <hyper_parallel/core/log.h>
#include <hyper_parallel/dtensor/dtensor.h>
#include <hyper_parallel/fsdp/init.h>
#include <hyper_parallel/fsdp/policy.h>
#include <hyper_parallel/fsdp/unit.h>
#include <hyper_parallel/mesh/device_mesh.h>
#include <hyper_parallel/nn/fully_shard.h>
#include <hyper_parallel/nn/init.h>
#include <hyper_parallel/nn/library.h>
#include <hyper_parallel/nn/module.h>
#include <hyper_parallel/optim/adamw.h>
#include <hyper_parallel/optim/clip_grad.h>
