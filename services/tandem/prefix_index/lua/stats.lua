-- Returns the size of one shard and the number of blocks of each of its workers, for metrics.
--
-- KEYS[1]   the shard's state, see redis.py; bucket keys are made from it, in the same hash slot
-- ARGV[1]   a bucket, 0 to 65535: the memory of 64 buckets from this one on is measured
-- returns   {next, entries, swept, bytes, log, worker, blocks, silent, ...}: next is 1 if another
--           shard exists; bytes is the memory of all buckets, estimated from the 64 measured ones;
--           `log` is the id of the log's last entry (append.lua; empty: no entry yet); silent is the
--           number of seconds since the worker last published
local state = KEYS[1]
local head = redis.call('HMGET', state, 'next', 'entries', 'swept', 'live', 'log')
local live, now = tonumber(head[4] or 0), tonumber(redis.call('TIME')[1])
local buckets, bytes = state .. ':b:', 0
for n = 0, 63 do
  local at = (tonumber(ARGV[1]) + n) % 65536
  local name = buckets .. string.char(math.floor(at / 256), at % 256)
  bytes = bytes + (redis.call('MEMORY', 'USAGE', name) or 0)
end
local reply = {tonumber(head[1] or 0), tonumber(head[2] or 0), tonumber(head[3] or 0), bytes * 1024,
  head[5] or ''}
for slot = 0, 30 do
  if bit.band(live, bit.lshift(1, slot)) ~= 0 then
    local told = redis.call('HMGET', state, 'worker:' .. slot, 'blocks:' .. slot, 'seen:' .. slot)
    reply[#reply + 1] = told[1]
    reply[#reply + 1] = tonumber(told[2])
    reply[#reply + 1] = now - tonumber(told[3])
  end
end
return reply
