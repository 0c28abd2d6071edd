-- Appends jobs to their streams.
-- KEYS: the streams.
-- ARGV: wire version; then for each job: number of its stream, job id, gateway, packed job.
-- Returns the entry ids.
local ids = {}
for at = 2, #ARGV, 4 do
  ids[#ids + 1] = redis.call('XADD', KEYS[tonumber(ARGV[at])], '*',
    'v', ARGV[1], 'id', ARGV[at + 1], 'to', ARGV[at + 2], 'j', ARGV[at + 3])
end
return ids
