-- Returns the shard's workers and, from a range of buckets, the entries of all of them.
--
-- KEYS[1]   the shard's state, see redis.py; bucket keys are made from it, in the same hash slot
-- ARGV[1]   the first bucket, 0 to 65535
-- ARGV[2]   limit on the number of entries plus the number of buckets that are read; the bucket that
--           reaches the limit is read to its end; 0: no bucket is read
-- returns   {end, now, origin, log, next, workers, entries}: buckets were read up to `end`, `end`
--           excluded; `now` is Redis's clock in milliseconds; `origin` and `log` are the ids of the
--           log's first and last entry (append.lua; empty: no entry yet); next is 1 if another shard
--           exists;
--           `workers` is {slot, worker, epoch, logged, complete, blocks, ...}: logged is 1 if all
--           changes of this epoch were appended to the log, complete is 1 if the worker has
--           published all its blocks under this epoch;
--           `entries` is {mask, entries, ...}: for each mask, the entries with this mask as one
--           string, 10 bytes each. Masks may have bits of slots that are not in `workers`
local state = KEYS[1]
local head = redis.call('HMGET', state, 'log', 'next', 'live', 'origin')
local live, workers = tonumber(head[3] or 0), {}
for slot = 0, 30 do
  if bit.band(live, bit.lshift(1, slot)) ~= 0 then
    local told = redis.call('HMGET', state, 'worker:' .. slot, 'epoch:' .. slot, 'logged:' .. slot,
      'complete:' .. slot, 'blocks:' .. slot)
    for _, value in ipairs({slot, told[1], told[2], told[3] == told[2] and 1 or 0,
      told[4] == told[2] and 1 or 0, tonumber(told[5])}) do
      workers[#workers + 1] = value
    end
  end
end

local buckets = state .. ':b:'
local at, budget = tonumber(ARGV[1]), tonumber(ARGV[2])
local by_mask = {}
while at < 65536 and budget > 0 do
  local name = string.char(math.floor(at / 256), at % 256)
  local found = redis.call('HGETALL', buckets .. name)
  for i = 1, #found, 2 do
    local mask = found[i + 1]
    local entries = by_mask[mask] or {}
    by_mask[mask] = entries
    entries[#entries + 1] = name .. found[i]
  end
  budget = budget - 1 - #found / 2
  at = at + 1
end
local reply = {}
for mask, entries in pairs(by_mask) do
  reply[#reply + 1] = tonumber(mask)
  reply[#reply + 1] = table.concat(entries)
end
local now = redis.call('TIME')
return {at, now[1] * 1000 + math.floor(now[2] / 1000), head[4] or '', head[1] or '',
  tonumber(head[2] or 0), workers, reply}
