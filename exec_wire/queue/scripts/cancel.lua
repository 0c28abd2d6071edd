-- Deletes jobs and tells the workers about those that a worker has taken.
-- KEYS: streams; then for each job its mark.
-- ARGV: group, channel, number of streams; then for each job: stream number, entry id (`-` if unknown), job id.
-- Returns the jobs that no worker has: not taken, or handed back.
local untaken, taken = {}, {}
for at = 4, #ARGV, 3 do
  local stream, id, job = KEYS[tonumber(ARGV[at])], ARGV[at + 1], ARGV[at + 2]
  local pending, removed = {}, 0
  if id ~= '-' then
    pending = redis.pcall('XPENDING', stream, ARGV[1], id, id, 1)
    removed = redis.call('XDEL', stream, id)
  end
  local held = not pending.err and pending[1]
  if removed == 1 and held then redis.call('XACK', stream, ARGV[1], id) end
  if removed == 1 and (not held or held[2] == 'nobody') then
    untaken[#untaken + 1] = job
  else
    taken[#taken + 1] = job
    redis.call('SET', KEYS[ARGV[3] + (at - 1) / 3], '', 'EX', 30)
  end
end
if #taken > 0 then redis.call('PUBLISH', ARGV[2], table.concat(taken, ' ')) end
return untaken
