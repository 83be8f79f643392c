-- append: adds an entry to the shard's log, a stream that the routers' replicas follow (replica.py).
-- redis.py puts this text before the scripts that change the tree.
--
-- Each entry names the entry before it in the field `after` (empty for the first one), so a reader
-- notices if an entry is missing. `log` in the shard's state is the id of the last entry. It is "lost"
-- if the Redis user may not use XADD, as with ACL rules of an older version: then replicas must not be
-- used, and the next entry names "lost" as the one before it. `origin` is the id of the first entry: if
-- it changes, the shard's data were lost.
--
-- An entry takes at most 5.2 KB of memory (256 hashes of a batch), so all entries take at most 62 MB.
-- In 10 s, 31 workers send at most 12,000 batches.
local LOG_ENTRIES_MAX = 12000
local LOG_S = 20 -- sweep.lua removes older entries
local function append(state, ...)
  local last = redis.call('HGET', state, 'log')
  local id = redis.pcall('XADD', state .. ':log', 'MAXLEN', '~', LOG_ENTRIES_MAX, '*',
    'after', last or '', ...)
  if type(id) == 'table' then id = 'lost' end
  redis.call('HSET', state, 'log', id)
  if not last then redis.call('HSET', state, 'origin', id) end
end

