// The pairwise commit log: a stream is an append-only sequence of records with one writer and many readers, in mapped files.
// A record that is committed survives the writer's SIGKILL (and with Durability::Host and flush() the host's end).
#pragma once

#include "pairlog/log_dir.h"
#include "pairlog/reader.h"
#include "pairlog/record.h"
#include "pairlog/writer.h"
